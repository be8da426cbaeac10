"""Options that many commands have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def run_option(*, required: bool = True, text: str = "Name of the training run.") -> Callable[[F], F]:
    """``--run``, also from the environment."""
    return click.option("--run", required=required, envvar="WEIGHTCAST_RUN", show_envvar=True, help=text)


def store_option(
    name: str = "store_url", *, required: bool = True, text: str = "s3://bucket/prefix or file:///…"
) -> Callable[[F], F]:
    """``--store``, also from the environment; the parameter is called ``name``."""
    return click.option("--store", name, required=required, envvar="WEIGHTCAST_STORE", show_envvar=True, help=text)
