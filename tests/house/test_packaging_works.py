"""The sdist builds a wheel that works in an environment which has never seen this checkout."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROUND_TRIP = """
import sys, numpy, codec, codec._native, weightcast
assert codec.__file__.startswith(sys.prefix) and weightcast.__file__.startswith(sys.prefix), codec.__file__
base = numpy.arange(1000, dtype=numpy.uint16)
new = base.copy()
new[::37] += 1
weightcast.apply_delta(base, weightcast.encode_delta(base, new))
assert (base == new).all()
assert (numpy.asarray(weightcast.decode_full(weightcast.encode_full(new))) == new).all()
print("round trip")
"""


@pytest.fixture(scope="module")
def built(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel); the wheel is built from the unpacked sdist, without build isolation."""
    out = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(root)])
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


def test_the_wheel_holds_the_packages_and_nothing_else(built: tuple[Path, Path], packages: tuple[str, ...]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = wheel.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(packages)
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    assert any(name.startswith("codec/_native") and name.endswith((".so", ".pyd")) for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_holds_what_is_needed_to_build_and_to_read(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "codec/FORMAT.md"} <= names
    assert not {name for name in names if name.startswith(("tests/", "bench/", ".ci/", "build/"))}


def test_the_wheel_works_in_a_fresh_environment(built: tuple[Path, Path], tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    # This interpreter's pip installs into the other environment; dependencies then come from where we run, by a path
    # that follows the new one and whose own .pth files (the editable checkout among them) are not read.
    run([sys.executable, "-m", "pip", "--python", str(python), "install", "-qq", "--no-deps", str(built[1])])
    site = next((environment / "lib").glob("python3*")) / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert run([str(environment / "bin" / "weightcast"), "--version"], tmp_path).startswith("weightcast, version ")
    assert run([str(python), "-I", "-c", ROUND_TRIP], tmp_path).strip() == "round trip"


def run(command: list[str], cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
