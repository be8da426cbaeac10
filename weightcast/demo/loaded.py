"""A model directory as an engine sees it: opened with the safetensors library, from its index."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Self

from safetensors import safe_open

from weightcast.demo.boxes import BoxPlace, raw_bytes
from weightcast.demo.errors import DemoError


class LoadedModel:
    """The tensors of a Hugging Face directory, as a context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._index: dict[str, str] = {}
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Self:
        index = json.loads((self._directory / "model.safetensors.index.json").read_text())
        self._index = index["weight_map"]
        for name in sorted(set(self._index.values())):
            self._files[name] = self._stack.enter_context(safe_open(str(self._directory / name), framework="pt"))
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._index)

    def rows(self, place: BoxPlace) -> bytes:
        """The bytes of the rows at ``place``; ``DemoError`` if name, shape or dtype differ from what was published."""
        if place.name not in self._index:
            raise DemoError(f"{self._directory} has no tensor {place.name}")
        part = self._files[self._index[place.name]].get_slice(place.name)
        if tuple(part.get_shape()) != place.shape:
            raise DemoError(f"{self._directory}: {place.name} has shape {part.get_shape()}, not {list(place.shape)}")
        tensor = part[place.start : place.start + place.rows] if place.shape else part[...]
        if str(tensor.dtype) != f"torch.{place.dtype}":
            raise DemoError(f"{self._directory}: {place.name} is {tensor.dtype}, not torch.{place.dtype}")
        return raw_bytes(tensor)
