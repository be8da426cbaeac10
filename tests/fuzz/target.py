"""What a fuzz target is: bytes in, nothing out, and no exception but those that the parser promises."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

MIB = 1 << 20

Plain = Callable[[bytes], bytes]
"""Damages bytes that have no structure; bound to the fuzzer's own mutator where there is one."""
Reshape = Callable[[bytes, random.Random, Plain], bytes]
"""Damages an input inside its envelope: takes it apart, damages a part, and puts checksums and lengths right."""


class Broken(AssertionError):
    """A property that a target promises does not hold."""


@dataclass(frozen=True)
class Target:
    """``run`` returns or raises nothing at all unless there is a finding.

    ``seeds`` makes valid inputs with the project's own writers. ``memory_bytes``: what one input may take beyond
    what the process had before. ``max_bytes``: of an input. ``ci_runs``: executions in the bounded run.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    reshape: Reshape | None = None
    words: tuple[bytes, ...] = ()
    memory_bytes: int = 512 * MIB
    max_bytes: int = 4096
    ci_runs: int = 1500
    covers: tuple[str, ...] = field(default=())
    """Names of the functions it is about, for people."""


def require(holds: object, what: str) -> None:
    """Raise :class:`Broken` unless ``holds``."""
    if not holds:
        raise Broken(what)


def mutate(target: Target, data: bytes, seeds: Sequence[bytes], rng: random.Random, plain: Plain) -> bytes:
    """One damaged version of an input: inside its envelope mostly, sometimes anywhere.

    Now and then of a seed instead: where much is parsed in native code, few inputs reach new branches of ours, and what
    the fuzzer keeps would soon be all alike.
    """
    if seeds and rng.random() < 0.2:
        data = rng.choice(seeds)
    if target.reshape is None or rng.random() < 0.25:
        return plain(data)
    try:
        return target.reshape(data, rng, plain)
    except Exception:
        return plain(data)  # it no longer has the form that can be taken apart


def plain_mutator(rng: random.Random, max_bytes: int, words: tuple[bytes, ...] = ()) -> Plain:
    """A mutator for machines without atheris: flips, cuts, repeats and inserts, blind to what they reach."""

    def damage(data: bytes) -> bytes:
        out = bytearray(data)
        for _ in range(1 + rng.randrange(3)):
            at = rng.randrange(len(out) + 1)
            end = min(len(out), at + 1 + rng.randrange(8))
            kind = rng.randrange(6)
            if kind == 0 and at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            elif kind == 1 and at < len(out):
                out[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
            elif kind == 2:
                del out[at:end]
            elif kind == 3:
                out[at:at] = out[at:end]
            elif kind == 4:
                out[at:at] = rng.choice(words) if words else rng.randbytes(1 + rng.randrange(8))
            else:
                out[at:end] = rng.randbytes(end - at)
        return bytes(out[:max_bytes])

    return damage
