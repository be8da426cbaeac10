"""Proves that publishing gathers nothing: inside the guard, making a whole sharded tensor is an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightcast.demo.errors import DemoError

Shape = tuple[int, ...]


@contextlib.contextmanager
def nothing_gathered(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Within the block, ``DemoError`` on any way to a full copy of one of ``tensors`` that is sharded.

    That is: ``DTensor.full_tensor`` and ``redistribute``, every gather of torch.distributed, and any plain tensor that
    has the global shape of a sharded one. On one rank a shard is the tensor, and only the calls are refused.
    """
    shapes = [(tuple(t.shape), tuple(t.to_local().shape)) for t in tensors if isinstance(t, DTensor)]
    whole = {shape for shape, _ in shapes} - {local for _, local in shapes}
    with contextlib.ExitStack() as stack:
        for owner, name in _GATHERS:
            stack.enter_context(_replaced(owner, name, _refuse(name)))
        stack.enter_context(_WholeShapes(whole))
        yield


_GATHERS: tuple[tuple[Any, str], ...] = (
    (DTensor, "full_tensor"),
    (DTensor, "redistribute"),
    (dist, "all_gather"),
    (dist, "all_gather_into_tensor"),
    (dist, "all_gather_object"),
    (dist, "gather"),
    (dist, "gather_object"),
)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refused(*_: object, **__: object) -> NoReturn:
        raise DemoError(f"publishing called {name}: a rank would hold a tensor that is sharded among all")

    return refused


class _WholeShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, whole: set[Shape]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whole = whole

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # Integers are raw bytes of shared memory, whose lengths mean nothing.
            plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.is_floating_point()
            if plain and tuple(leaf.shape) in self._whole:
                raise DemoError(f"publishing made a whole {list(leaf.shape)} tensor with {func}: it is sharded")
        return result
