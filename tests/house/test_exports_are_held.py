"""`import weightcast` gives exactly the documented names, and costs nothing until they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import weightcast

PROMISED = [
    "CodecError",
    "CoordinatorError",
    "MemoryStore",
    "Piece",
    "Publisher",
    "Replica",
    "RolloutError",
    "TrainerError",
    "WeightStoreError",
    "apply_delta",
    "decode_full",
    "delta_compress",
    "delta_decompress",
    "encode_delta",
    "encode_full",
    "open_store",
]


def test_all_names_what_was_promised_in_order() -> None:
    assert weightcast.__all__ == PROMISED


@pytest.mark.parametrize("name", PROMISED)
def test_every_name_is_there_and_public_where_it_comes_from(name: str) -> None:
    value = getattr(weightcast, name)
    assert value.__name__ == name
    assert value.__doc__
    assert name in dir(weightcast)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'pickle_weights'"):
        _ = weightcast.pickle_weights


def test_type_checkers_see_the_same_names_from_the_same_modules() -> None:
    tree = ast.parse(Path(weightcast.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    seen = {alias.name: node.module for node in imports for alias in node.names if alias.name != "TYPE_CHECKING"}
    assert seen == weightcast._HOMES


@pytest.mark.parametrize("package", ["codec", "coordinator", "rollout_agent", "trainer_agent", "weight_store"])
def test_all_of_a_package_is_real(package: str) -> None:
    module = __import__(package)
    assert all(hasattr(module, name) for name in getattr(module, "__all__", ()))


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import sys, weightcast; print(sorted({'torch', 'boto3', 'numpy', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
