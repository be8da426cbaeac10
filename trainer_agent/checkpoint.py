"""A Hugging Face safetensors directory as a source of tensors: mapped, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from trainer_agent.errors import InvalidPieces

INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Pairs of name and tensor of all ``files``; may be iterated again. Raises ``InvalidPieces`` for damaged files."""

    files: tuple[Path, ...]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path in self.files:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                        yield name, file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise InvalidPieces(f"{path} cannot be read as safetensors: {error}") from None


def open_checkpoint(directory: Path) -> Checkpoint:
    """The checkpoint in ``directory``: the files its index names, else all its safetensors files.

    Raises ``InvalidPieces`` if there are none, or if one is no file, or if the index names one that is not there.
    """
    index = directory / INDEX_FILE
    names = _indexed(index) if index.exists() else sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise InvalidPieces(f"{directory} holds no safetensors files")
    missing = [name for name in names if not _is_file(directory / name)]
    if missing and not index.exists():
        raise InvalidPieces(f"{directory / missing[0]} is not a regular file, nor a link to one")
    if missing:
        raise InvalidPieces(
            f"{index} names {missing[0][:200]!r}, which is not there: is the checkpoint still being written?"
        )
    return Checkpoint(tuple(directory / name for name in names))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file system takes
        return False


def _indexed(index: Path) -> list[str]:
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise InvalidPieces(f"{index} is larger than any index of a checkpoint")
    try:
        files = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidPieces(f"{index} is not an index of safetensors files") from None
    if not all(isinstance(name, str) and name == Path(name).name and name not in ("", "..") for name in files):
        raise InvalidPieces(f"{index} names files outside its directory")
    return sorted(files)
