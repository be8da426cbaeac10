"""Runs targets one after the other, each in a process of its own.

The modules are imported once, instrumented, and every target gets a fork of that. ``<out>/<target>/corpus`` grows
from run to run; ``<out>/<target>/findings`` holds the inputs that broke something.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.budget import Budget
from tests.fuzz.target import Target, mutate, plain_mutator

PACKAGES = ["codec", "weight_store", "coordinator", "trainer_agent", "rollout_agent", "weightcast"]
HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
"""Inputs that once broke something, by target; replayed by the tests."""
_SHARED = os.environ.get("WEIGHTCAST_SHM_DIR") or ("/dev/shm" if Path("/dev/shm").is_dir() else None)
"""Where files cost no disk."""


def atheris_module() -> types.ModuleType | None:
    """Atheris where it is installed: it has wheels for Linux and some Pythons only."""
    return importlib.import_module("atheris") if importlib.util.find_spec("atheris") else None


def load(*, instrumented: bool) -> dict[str, Target]:
    """Import all targets, and with them the project; instrumented so that new branches are seen."""
    atheris = atheris_module()
    watch = contextlib.nullcontext()
    if instrumented and atheris is not None:
        watch = atheris.instrument_imports(include=PACKAGES, enable_loader_override=False)
    # An editable installation brings a finder of its own, whose modules atheris leaves alone: the plain one goes first.
    sys.meta_path.insert(0, importlib.machinery.PathFinder)
    with watch:
        found: dict[str, Target] = importlib.import_module("tests.fuzz.registry").TARGETS
    sys.meta_path.remove(importlib.machinery.PathFinder)
    return found


@contextlib.contextmanager
def bounded_memory(extra_bytes: int) -> Iterator[None]:
    """Within this, the process may have ``extra_bytes`` of address space more than it has now."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def replay(target: Target, data: bytes) -> None:
    """Run one input; raises what the target raises."""
    with bounded_memory(target.memory_bytes):
        target.run(data)


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Within this, what this process and its children write to stderr, libFuzzer's statistics too, goes to ``log``."""
    sys.stderr.flush()
    kept = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def fuzz(target: Target, budget: Budget, out: Path) -> list[Path]:
    """Run a target in a child process; the findings it has now, those of earlier runs included.

    What it writes goes to ``<out>/<target>/log``, and is shown if the run ended badly.
    """
    corpus, findings = out / target.name / "corpus", out / target.name / "findings"
    for folder in (corpus, findings):
        folder.mkdir(parents=True, exist_ok=True)
    seeds = [*target.seeds(), *(path.read_bytes() for path in sorted((CORPUS / target.name).glob("*")))]
    for seed in seeds:
        (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(seed)  # as libFuzzer names them
    log = out / target.name / "log"
    # The child may be killed: what it makes lies in a directory of its parent's.
    with quiet(log), tempfile.TemporaryDirectory(prefix="weightcast-fuzz-", dir=_SHARED) as scratch:
        status = _run_child(Work(target, budget, tuple(seeds), corpus, findings), scratch)
    if status:
        print(log.read_text("utf-8", "replace"), file=sys.stderr, flush=True)
    found = sorted(findings.iterdir())
    if status and not found:
        note = findings / "died"
        note.write_bytes(b"")
        print(f"{target.name}: the process ended with status {status} and left no input")
        found = [note]
    return found


@dataclass(frozen=True)
class Work:
    """One target, and where its inputs come from and go."""

    target: Target
    budget: Budget
    seeds: tuple[bytes, ...]
    corpus: Path
    findings: Path

    def run(self, data: bytes) -> None:
        """Run one input; what is found is written down, and ends the process as libFuzzer would."""
        try:
            self.target.run(data)
        except BaseException:
            traceback.print_exc()
            (self.findings / f"crash-{hashlib.sha1(data).hexdigest()}").write_bytes(data)
            sys.stderr.flush()
            os._exit(77)


def _run_child(work: Work, scratch: str) -> int:
    """Fork, work, wait: the child's status. Temporary files of the child lie in ``scratch``."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _in_child(work, scratch)
    try:
        return os.waitpid(child, 0)[1]
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise


def _in_child(work: Work, scratch: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    tempfile.tempdir = scratch
    try:
        (_blind if atheris_module() is None else _guided)(work)
        os._exit(0)
    except SystemExit as end:
        os._exit(int(end.code or 0))
    except BaseException:
        traceback.print_exc()
        os._exit(70)


def _guided(work: Work) -> None:
    atheris = importlib.import_module("atheris")
    target, budget = work.target, work.budget

    def custom(data: bytes, max_bytes: int, seed: int) -> bytes:
        plain = functools.partial(_by_atheris, atheris, max_bytes)
        return mutate(target, data, work.seeds, random.Random(seed), plain)[:max_bytes]

    arguments = [
        "fuzz",
        str(work.corpus),
        f"-artifact_prefix={work.findings}/",
        f"-runs={budget.runs or -1}",
        f"-max_total_time={budget.seconds}",
        f"-seed={budget.seed}",
        "-keep_seed=1",
        f"-max_len={target.max_bytes}",
        f"-timeout={budget.slow_s}",
        "-rss_limit_mb=0",  # the address space is bounded instead, so that the culprit gets a MemoryError
        "-verbosity=" + os.environ.get("WEIGHTCAST_FUZZ_VERBOSITY", "0"),
        "-print_final_stats=1",
    ]
    if target.words:
        dictionary = work.corpus.parent / "dictionary"
        dictionary.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words))
        arguments.append(f"-dict={dictionary}")
    with bounded_memory(target.memory_bytes):
        atheris.Setup(arguments, work.run, custom_mutator=custom)
        atheris.Fuzz()


def _by_atheris(atheris: types.ModuleType, max_bytes: int, part: bytes) -> bytes:
    found: bytes = atheris.Mutate(part, max_bytes)
    return found


def _escaped(word: bytes) -> str:
    return "".join(chr(b) if 32 <= b < 127 and chr(b) not in '"\\' else f"\\x{b:02x}" for b in word)


def _blind(work: Work) -> None:
    """Without atheris: the same damage, not guided by what it reaches."""
    target, budget = work.target, work.budget
    rng = random.Random(budget.seed)
    plain = plain_mutator(rng, target.max_bytes, target.words)
    inputs = [path.read_bytes() for path in sorted(work.corpus.iterdir())]
    end_s = time.monotonic() + budget.seconds if budget.seconds else float("inf")
    runs = 0
    with bounded_memory(target.memory_bytes):
        while (not budget.runs or runs < budget.runs) and time.monotonic() < end_s:
            data = inputs[runs] if runs < len(inputs) else mutate(target, rng.choice(inputs), work.seeds, rng, plain)
            runs += 1
            work.run(data[: target.max_bytes])
