"""Options that the commands which publish have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import torch

from weightcast.commands._options import run_option, store_option

_DTYPES = {"keep": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def publishing_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--run``, ``--store``, ``--coordinator``, ``--dtype`` and ``--full-every``."""
    options = (
        run_option(),
        store_option("store"),
        click.option(
            "--coordinator",
            default="http://127.0.0.1:8470",
            show_default=True,
            envvar="WEIGHTCAST_COORDINATOR",
            show_envvar=True,
            help="Address of the coordinator.",
        ),
        click.option(
            "--dtype",
            default="keep",
            show_default=True,
            type=click.Choice(list(_DTYPES)),
            help="Cast floats of 16 bits and more to this, except router biases and scales; keep: cast nothing.",
        ),
        click.option(
            "--full-every",
            default=50,
            show_default=True,
            type=click.IntRange(min=0),
            help="Upload a full in the background every so many versions, for machines that join late; 0: only when "
            "the chain of deltas has become long.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def dtype_of(name: str) -> torch.dtype | None:
    """The value of ``--dtype``."""
    return _DTYPES[name]
