"""Promise: the public names are the listed ones, and the error tree is the one drawn."""

from __future__ import annotations

import re
import subprocess
import sys

import codec
from codec import errors


def test_all_is_sorted_and_complete():
    assert codec.__all__ == sorted(codec.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    public = {
        name
        for name, value in vars(codec).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "codec").startswith("codec")
        and not hasattr(value, "__file__")
    }
    assert public - {"annotations"} == set(codec.__all__)


def tree(cls, depth=0):
    yield depth, cls
    for child in cls.__subclasses__():
        yield from tree(child, depth + 1)


def test_the_drawn_error_tree_is_the_real_one():
    drawn = [
        (len(indent) // 4, name)
        for indent, name in re.findall(r"^    ([│├└─ ]*)(\w+)(?: \(ValueError\))?  +\w", errors.__doc__, re.MULTILINE)
    ]
    assert sorted(drawn) == sorted((depth, cls.__name__) for depth, cls in tree(codec.CodecError))


def test_codes_are_stable_and_unique():
    assert {cls.__name__: cls.code for _, cls in tree(codec.CodecError)} == {
        "CodecError": "codec",
        "InvalidInput": "invalid-input",
        "CorruptFrame": "corrupt-frame",
        "TruncatedFrame": "truncated-frame",
        "UnsupportedFrame": "unsupported-frame",
        "BaseMismatch": "base-mismatch",
    }


def test_torch_is_not_imported_until_a_tensor_comes():
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, codec; codec.encode_full(__import__('numpy').zeros(3)); assert 'torch' not in sys.modules",
        ],
        check=True,
    )
