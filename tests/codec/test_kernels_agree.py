"""Promise: every set of kernels computes what the portable one does, to the bit, on the processor that it is for.

What is compiled here and in a build under sanitizers is compiled with warnings as errors.
"""

from __future__ import annotations

import platform
import shutil
import subprocess

import pytest

CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
ON_ARM = platform.machine() in ("aarch64", "arm64")


def output(*command):
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_the_set_of_this_processor(sanitized):
    said = output(sanitized / "kernels", "1", "300")
    assert said in {f"{name}: 300 cases\n" for name in ("portable", "AVX2", "NEON")}
    assert not ON_ARM or said.startswith("NEON")


@pytest.mark.skipif(ON_ARM, reason="this is ARM: NEON runs natively in the other tests")
@pytest.mark.skipif(not shutil.which(CROSS), reason=f"{CROSS} is not installed (Debian: g++-aarch64-linux-gnu)")
@pytest.mark.skipif(not shutil.which(EMULATOR), reason=f"{EMULATOR} is not installed (Debian: qemu-user)")
def test_neon_under_an_emulator(native_programs, tmp_path):
    native_programs(tmp_path, CROSS, FLAGS="-O1 -static")
    assert output(EMULATOR, tmp_path / "kernels", "1", "300") == "NEON: 300 cases\n"
    # Whole bodies, also damaged ones, by both sets.
    assert output(EMULATOR, tmp_path / "hostile", "1", "40") == "1680 bodies\n"
