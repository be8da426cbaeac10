"""Switches a mechanism off in every process of a soak: ``python -m tests.soak --without 'gate: the lock'``.

What is switched off is the same as in the simulation (``tests/sim/mutations.py``), and two mechanisms of the store,
which the simulation has one of its own for. The processes are told by their environment and patch themselves as they
start: see ``tests/soak/site``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from tests.sim.mutations import MUTATIONS
from tests.soak.processes import WITHOUT
from weight_store.s3 import S3Store

_PUT = S3Store._put


async def _put_over_decisions(self: S3Store, key: str, data: bytes, **condition: str) -> str:
    return await _PUT(self, key, data, **({} if key.endswith("/manifest.json") else condition))


async def _put_over_the_head(self: S3Store, key: str, data: bytes, **condition: str) -> str:
    return await _PUT(self, key, data, **({} if "IfMatch" in condition else condition))


_STORE = {"abort register": _put_over_decisions, "parent check of the head": _put_over_the_head}
_SIMULATED = {"sync of the commit", "unfinished uploads go", "signing by the store's time"}
"""What only a simulation can show: a kill loses nothing that was not synced, and here no clock is wrong."""
NAMES = tuple(sorted(MUTATIONS.keys() - _SIMULATED))


def environment(name: str) -> Mapping[str, str]:
    """What makes a process patch itself."""
    here = Path(__file__).resolve().parent
    return {WITHOUT: name, "PYTHONPATH": os.pathsep.join([str(here / "site"), str(here.parents[1])])}


def switch_off(name: str) -> None:
    """Until this process ends."""
    patches: tuple[tuple[Any, str, Any], ...] = MUTATIONS[name].patches
    if name in _STORE:
        patches = ((S3Store, "_put", _STORE[name]),)
    stack = ExitStack()
    for owner, attribute, value in patches:
        stack.enter_context(mock.patch.object(owner, attribute, value))
