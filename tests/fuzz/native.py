"""The one target that is not Python: bodies of ulp_v1 in the kernels, under AddressSanitizer and UBSan.

With clang it is libFuzzer's, guided by the coverage of the kernels; without, the generator of damaged bodies that the
tests use too, which any compiler builds. The tests also build the target with that compiler, and run its seeds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.fuzz.budget import Budget

NAME = "native-ulp"
_SCRIPT = Path(__file__).parents[1] / "codec" / "native" / "build_hostile.sh"
_FLAGS = "-O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
_FLAGS += " -DWEIGHTCAST_LIBFUZZER"
_MAX_BYTES = 4096


def fuzz_native(budget: Budget, out: Path) -> list[Path]:
    """Build, run, and return the findings, those of earlier runs included. Raises ``CalledProcessError`` if it does
    not build.
    """
    folder = (out / NAME).absolute()
    for name in ("corpus", "findings"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    if shutil.which("clang++"):
        _guided(budget, folder)
    else:
        print("clang++ is not installed here: damaged bodies are made up, not guided by coverage", flush=True)
        _generated(budget, folder)
    return sorted((folder / "findings").iterdir())


def replay_command(folder: Path, finding: Path) -> str:
    """What to type to see a finding again."""
    return f"{folder / NAME / 'fuzz_ulp'} {finding}" if finding.suffix != ".txt" else f"cat {finding}"


def _guided(budget: Budget, folder: Path) -> None:
    environment = {**os.environ, "PROGRAMS": "fuzz_ulp", "FLAGS": _FLAGS}
    subprocess.run([_SCRIPT, folder, "clang++"], env=environment, check=True)
    program = folder / "fuzz_ulp"
    subprocess.run([program], env={**os.environ, "WEIGHTCAST_SEEDS": str(folder / "corpus")}, check=True)
    arguments = [
        str(folder / "corpus"),
        f"-artifact_prefix={folder / 'findings'}/",
        f"-runs={budget.runs or -1}",
        f"-max_total_time={budget.seconds}",
        f"-seed={budget.seed}",
        f"-max_len={_MAX_BYTES}",
        f"-timeout={budget.slow_s}",
        "-verbosity=0",
        "-print_final_stats=1",
    ]
    with (folder / "log").open("wb") as log:
        done = subprocess.run([program, *arguments], stdout=log, stderr=log, check=False)
    if done.returncode:
        print((folder / "log").read_text("utf-8", "replace"), flush=True)


def _generated(budget: Budget, folder: Path) -> None:
    subprocess.run([_SCRIPT, folder], check=True)
    amount = f"{budget.seconds}s" if budget.seconds else str(budget.runs or 1000)
    done = subprocess.run(
        [folder / "hostile", str(budget.seed), amount], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        # The output names the seed of the case, which is all that is needed to see it again.
        (folder / "findings" / f"seed-{budget.seed}.txt").write_bytes(done.stdout)
