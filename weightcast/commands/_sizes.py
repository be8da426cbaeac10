"""Sizes as people read them."""

from __future__ import annotations


def in_bytes(count: int) -> str:
    """``count`` bytes with a decimal unit: 999 B, 1.5 kB, 2.0 GB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
