"""``python -m tests.fuzz``: fuzz every parser for a while, or run one input again.

Without ``--seconds`` or ``--runs``, each target gets the runs that the tests give it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

from tests.fuzz import native
from tests.fuzz.budget import Budget
from tests.fuzz.running import atheris_module, fuzz, load, quiet, replay
from tests.fuzz.target import Target

OVERHEAD_S = 1.5
"""What a target takes beside its seconds, about: libFuzzer goes on until they are exceeded."""
LEAST_S = 3


def main() -> int:
    """Returns 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=0, help="for all targets together, each at least one")
    parser.add_argument("--runs", type=int, default=0, help="executions of each target")
    parser.add_argument("--seed", type=int, default=1, help="of the fuzzer's choices (default 1)")
    parser.add_argument("--slow", type=int, default=30, help="seconds from which one input is a finding (default 30)")
    parser.add_argument("--target", action="append", default=[], help="only this target; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="corpus and findings (default build/fuzz)")
    parser.add_argument("--replay", type=Path, help="run this input of --target and show what happens")
    parser.add_argument("--list", action="store_true", help="list the targets and what they are about")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets would change from run to run
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.fuzz", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
        )
    started_s = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what lies about is removed then too
    warnings.simplefilter("ignore")
    fuzzing = not options.replay and not options.list
    with tempfile.TemporaryDirectory() as folder, quiet(Path(folder) / "log") if fuzzing else contextlib.nullcontext():
        targets = load(instrumented=fuzzing)
    unknown = [name for name in options.target if name not in targets and name != native.NAME]
    if unknown:
        parser.error(f"no target {unknown[0]!r}; known are {', '.join(targets)}, {native.NAME}")
    if options.list:
        print("\n".join(f"{name:20} {', '.join(target.covers)}" for name, target in targets.items()))
        print(f"{native.NAME:20} the kernels of ulp_v1, under sanitizers")
        return 0
    if options.replay:
        if len(options.target) != 1 or options.target == [native.NAME]:
            parser.error("--replay needs one --target, in Python")
        replay(targets[options.target[0]], options.replay.read_bytes())
        print("nothing happens")
        return 0
    return _many(options, targets, started_s)


def _many(options: argparse.Namespace, targets: dict[str, Target], started_s: float) -> int:
    if atheris_module() is None:
        print("atheris is not installed here (it has wheels for Linux and some Pythons): not guided by coverage")
    # Building the native target takes longer than the bounded run of all others; the codec's tests have their own.
    names = options.target or [*([native.NAME] if options.seconds else []), *targets]
    if 0 < options.seconds < LEAST_S * len(names):
        print(f"{len(names)} targets take some {LEAST_S} s each, and as long as loading and building take beside that")
    found = 0
    for number, name in enumerate(names):
        begun_s = time.monotonic()
        left_s = options.seconds - (begun_s - started_s)
        # libFuzzer takes whole seconds, and 0 for ever.
        seconds = max(1, round(left_s / (len(names) - number) - OVERHEAD_S)) if options.seconds else 0
        runs = options.runs or (0 if seconds else targets[name].ci_runs if name in targets else 1000)
        budget = Budget(runs, seconds, options.seed, options.slow)
        if name == native.NAME:
            paths = {path: native.replay_command(options.out, path) for path in native.fuzz_native(budget, options.out)}
        else:
            replaying = f"python -m tests.fuzz --target {name} --replay"
            paths = {path: f"{replaying} {path}" for path in fuzz(targets[name], budget, options.out)}
        print(f"{name}: {time.monotonic() - begun_s:.0f} s, {len(paths)} findings", flush=True)
        for command in paths.values():
            print(f"{name}: {command}", flush=True)
        found += len(paths)
    print(f"{len(names)} targets in {time.monotonic() - started_s:.0f} s, {found} findings in {options.out}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
