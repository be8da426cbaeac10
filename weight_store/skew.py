"""What to make of a server's time that differs from this machine's, where it refuses a signature for that. Pure."""

from __future__ import annotations

TOLERATED_S = 60.0
"""Less than that, and the clock is right: what was corrected before has been repaired."""
CREDIBLE_S = 86_400.0
"""More than that, and there is no telling whose clock is wrong: the answer may as well be no S3 server's."""


def correction_s(ahead_s: float) -> float | None:
    """What to add to this machine's time when signing (seconds), for a server that says it is ``ahead_s`` ahead of it.

    None if it is not to be believed.
    """
    if abs(ahead_s) > CREDIBLE_S:
        return None
    return ahead_s if abs(ahead_s) > TOLERATED_S else 0.0
