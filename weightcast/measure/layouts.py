"""Other projects' published layouts, written down again so that their size can be compared on any data.

PULSESync (the sparse codec of grail, format 31): per tensor row gaps, column gaps and absolute values, in one zstd-1
frame. TRL (the first draft, "sparse_weight_patch" version 1): plain safetensors of int32 positions and absolute values.
XOR + zstd-1: what a short script would do. Elements have 16 bits in the first two. Decoders here are for data that this
process has just encoded, not for bytes from elsewhere.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from safetensors.torch import load, save

from codec.digest import as_bytes
from codec.dtypes import Bits
from weightcast.measure.pairs import Group, Pair

PULSESYNC_VERSION = 31
TRL_BITS_PER_CHANGE = 48


def pulsesync_encode(pairs: Sequence[Pair]) -> bytes:
    """One file with all changed tensors, sorted by name."""
    entries: list[dict[str, Any]] = []
    body: list[bytes] = []
    at = 0
    for pair in sorted(pairs, key=lambda pair: pair.name):
        where = np.flatnonzero(pair.base != pair.new)
        if not where.size:
            continue
        rows, columns = _gaps(where, prod(pair.shape[1:]) if len(pair.shape) > 1 else 1)
        values = pair.new[where].tobytes()
        indices_size = rows.nbytes + columns.nbytes
        entries.append(
            {
                "name": pair.name,
                "shape": list(pair.shape),
                "num_nonzero": int(where.size),
                "value_dtype": "bfloat16",
                "row_dtype": rows.dtype.name,
                "col_dtype": columns.dtype.name,
                "indices_offset": at,
                "indices_size": indices_size,
                "rows_size": rows.nbytes,
                "cols_size": columns.nbytes,
                "values_offset": at + indices_size,
                "values_size": len(values),
            }
        )
        body += [rows.tobytes(), columns.tobytes(), values]
        at += indices_size + len(values)
    header = json.dumps({"version": PULSESYNC_VERSION, "tensors": entries}, separators=(",", ":")).encode()
    return zstandard.ZstdCompressor(level=1).compress(struct.pack("<I", len(header)) + header + b"".join(body))


def pulsesync_decode(blob: bytes, pairs: Sequence[Pair]) -> list[Bits]:
    """The new bits of ``pairs``, in their order, from their bases."""
    plain = zstandard.ZstdDecompressor().decompress(blob)
    (size,) = struct.unpack_from("<I", plain)
    entries = {entry["name"]: entry for entry in json.loads(plain[4 : 4 + size])["tensors"]}
    body = memoryview(plain)[4 + size :]
    result = []
    for pair in pairs:
        now = pair.base.copy()
        if pair.name in entries:
            entry = entries[pair.name]
            rows = _array(body, entry["indices_offset"], entry["rows_size"], entry["row_dtype"])
            columns = _array(body, entry["indices_offset"] + entry["rows_size"], entry["cols_size"], entry["col_dtype"])
            width = prod(pair.shape[1:]) if len(pair.shape) > 1 else 1
            now[_positions(rows, columns, width)] = _array(
                body, entry["values_offset"], entry["values_size"], now.dtype.name
            )
        result.append(now)
    return result


def trl_encode(pairs: Sequence[Pair], step: int = 0) -> bytes:
    """One safetensors file with ``<name>.indices`` and ``<name>.values`` of every changed tensor."""
    tensors: dict[str, torch.Tensor] = {}
    names = []
    for pair in pairs:
        where = np.flatnonzero(pair.base != pair.new)
        if where.size:
            names.append(pair.name)
            tensors[f"{pair.name}.indices"] = torch.from_numpy(where.astype(np.int32))
            values = torch.from_numpy(pair.new[where].view(np.int16))
            tensors[f"{pair.name}.values"] = values.view(torch.bfloat16)
    changed = sum(tensor.numel() for key, tensor in tensors.items() if key.endswith(".indices"))
    total = sum(pair.new.size for pair in pairs)
    metadata = {
        "format": "sparse_weight_patch",
        "version": "1",
        "sparse": "True",
        "model_version": str(step),
        "num_changed_params": str(len(names)),
        "total_changed_elements": str(changed),
        "total_elements": str(total),
        "sparsity": str(1 - changed / max(1, total)),
        "changed_params": json.dumps(names),
    }
    return save(tensors, metadata)


def trl_decode(blob: bytes, pairs: Sequence[Pair]) -> list[Bits]:
    """The new bits of ``pairs``, in their order, from their bases."""
    tensors = load(blob)
    result = []
    for pair in pairs:
        now = pair.base.copy()
        index = tensors.get(f"{pair.name}.indices")
        if index is not None:
            now[index.numpy()] = tensors[f"{pair.name}.values"].view(torch.int16).numpy().view(np.uint16)
        result.append(now)
    return result


def xor_zstd_encode(groups: Sequence[Group]) -> list[bytes]:
    """The XOR of each group as one zstd-1 frame."""
    packer = zstandard.ZstdCompressor(level=1)
    return [packer.compress(as_bytes(group.base ^ group.new)) for group in groups]


def xor_zstd_decode(blobs: Sequence[bytes], groups: Sequence[Group]) -> list[Bits]:
    """The new bits of each group."""
    unpacker = zstandard.ZstdDecompressor()
    return [
        np.frombuffer(unpacker.decompress(blob), group.base.dtype) ^ group.base
        for blob, group in zip(blobs, groups, strict=True)
    ]


def _gaps(where: NDArray[np.int64], width: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Gaps of the rows, and of the columns within a row, in the narrowest types that the layout has."""
    row, column = np.divmod(where, width)
    row_gap = np.diff(row, prepend=0)
    column_gap = np.diff(column, prepend=0)
    first = row_gap != 0
    first[0] = True
    column_gap[first] = column[first]
    top = row_gap.max()
    rows = row_gap.astype(np.uint8 if top <= 0xFF else np.uint16 if top <= 0xFFFF else np.int32)
    return rows, column_gap.astype(np.uint16 if column_gap.max() <= 0xFFFF else np.int32)


def _positions(row_gap: NDArray[Any], column_gap: NDArray[Any], width: int) -> NDArray[np.int64]:
    row = np.cumsum(row_gap, dtype=np.int64)
    first = row_gap != 0
    first[0] = True
    total = np.cumsum(column_gap, dtype=np.int64)
    starts = np.flatnonzero(first)
    before = total[starts] - column_gap[starts]
    column = total - np.repeat(before, np.diff(starts, append=row.size))
    where: NDArray[np.int64] = row * width + column
    return where


def _array(body: memoryview, offset: int, size: int, dtype: str) -> NDArray[Any]:
    return np.frombuffer(body[offset : offset + size], dtype)
