"""Damage within a form: JSON documents node by node, and whatever lies under a checksum."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tests.fuzz.target import Plain, Reshape

NUMBERS = (0, 1, -1, 2, 15, 16, 255, 256, 2**31 - 1, 2**31, 2**32, 2**48, 2**48 + 1, 2**53, 2**63 - 1, 2**63, 2**64)
TEXTS = ("", "..", "../../x", "/etc/passwd", "a\x00b", "x" * 600, "\u2028", "\ud800", "NaN", "0" * 64, "é", "\n", "٣")
OTHERS = (None, True, False, [], {}, 0.5, -0.0, 1e308, float("inf"), float("nan"), [[]], {"": None})

Path = tuple[str | int, ...]


def reshape_json(data: bytes, rng: random.Random, plain: Plain) -> bytes:
    """One or two nodes replaced, removed, repeated or exchanged. Raises ``ValueError`` if ``data`` is no JSON."""
    if rng.random() < 0.02:
        depth = rng.choice((100, 1000, 20_000))
        return b"[" * depth if rng.random() < 0.5 else b'{"format":' * depth
    document = json.loads(data)
    for _ in range(1 + rng.randrange(2)):
        document = _damage(document, rng, plain)
    return json.dumps(document, separators=(",", ":")).encode()


def _paths(node: Any, at: Path = ()) -> list[Path]:
    found = [at]
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        found += _paths(child, (*at, key))
    return found


def _get(node: Any, path: Path) -> Any:
    for key in path:
        node = node[key]
    return node


def _damage(document: Any, rng: random.Random, plain: Plain) -> Any:
    paths = _paths(document)
    path = rng.choice(paths)
    if not path:
        return document
    parent, key = _get(document, path[:-1]), path[-1]
    kind = rng.randrange(5)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, list):
        parent.insert(rng.randrange(len(parent) + 1), parent[int(key)])
    elif kind == 2:
        other = rng.choice(paths)
        parent[key] = json.loads(json.dumps(_get(document, other)))
    elif kind == 3 and isinstance(parent, dict):
        parent[_text(str(key), rng, plain)] = parent[key]
    else:
        parent[key] = _value(parent[key], rng, plain)
    return document


def _value(old: Any, rng: random.Random, plain: Plain) -> Any:
    if isinstance(old, bool) or rng.random() < 0.15:
        return rng.choice(OTHERS)
    if isinstance(old, int):
        near = old + rng.choice((-2, -1, 1, 2, 7))
        return rng.choice((near, near, -old, old * 2, old // 2, rng.choice(NUMBERS), rng.choice(NUMBERS) - 1))
    if isinstance(old, str):
        return _text(old, rng, plain)
    if isinstance(old, list):
        return rng.choice((old[::-1], old + old, old[1:], sorted(old, key=str)))
    return rng.choice((*NUMBERS, *TEXTS, *OTHERS))


def _text(old: str, rng: random.Random, plain: Plain) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(TEXTS)
    if kind == 1 and old:
        at = rng.randrange(len(old))
        return old[:at] + rng.choice("0aZ_.-/ \0\u00b2") + old[at + rng.randrange(2) :]
    return plain(old.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")


def within(take: Callable[[bytes], bytes], damage: Reshape, put: Callable[[bytes, bytes], bytes]) -> Reshape:
    """Damage what ``take(data)`` finds in an envelope; ``put(data, inner)`` closes it again, checksums and all."""

    def reshape(data: bytes, rng: random.Random, plain: Plain) -> bytes:
        return put(data, damage(take(data), rng, plain))

    return reshape


def repaired(repair: Callable[[bytes], bytes]) -> Reshape:
    """Damage anywhere, then ``repair``: put checksums right, so that the damage is looked at."""

    def reshape(data: bytes, rng: random.Random, plain: Plain) -> bytes:
        return repair(plain(data))

    return reshape


def either(*ways: Reshape) -> Reshape:
    """One of several ways, by chance."""

    def reshape(data: bytes, rng: random.Random, plain: Plain) -> bytes:
        return rng.choice(ways)(data, rng, plain)

    return reshape
