"""The one copy for which training waits: from the trainer's tensors, cast on their device, into the slot."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable

import torch

from trainer_agent.errors import InvalidPieces
from trainer_agent.piece import Casting, Piece, torch_dtype
from trainer_agent.placement import Copy, CopyPlan
from weight_store.boxes import Box

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SlotWriter:
    """One slot as torch sees it. On CUDA machines its pages are pinned, once, so that copies run by themselves."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._pinned = False
        self.frozen_filled = False

    def copy(self, plan: CopyPlan, pieces: Iterable[Piece], casting: Casting) -> None:
        """Copy what this rank owns of ``pieces``; complete when this returns. Frozen tensors are copied once.

        Raises ``PiecesChanged`` or ``InvalidPieces``; the slot then holds nothing of use.
        """
        seen: set[tuple[str, Box]] = set()
        skip_frozen = self.frozen_filled
        self.frozen_filled = False
        side = _SideStream()
        for piece in pieces:
            row = casting.row(piece)
            known = plan.find(row.name, row.dtype, row.shape, row.box)
            if (row.name, row.box) in seen:
                raise InvalidPieces(f"{row.name}: box {row.box} comes twice")
            seen.add((row.name, row.box))
            if known.copies and piece.tensor.is_cuda:
                self._pin()
            for copy in known.copies:
                if not (copy.frozen and skip_frozen):
                    self._copy(piece, copy, torch_dtype(row.dtype), side)
        plan.check_complete(seen)
        side.synchronize()
        self.frozen_filled = skip_frozen or plan.frozen <= {name for name, _ in seen}

    def _copy(self, piece: Piece, copy: Copy, dtype: torch.dtype, side: _SideStream) -> None:
        source = piece.tensor.detach()
        for axis, (offset, size) in enumerate(zip(copy.offsets, copy.sizes, strict=True)):
            source = source.narrow(axis, offset, size)
        nbytes = source.numel() * dtype.itemsize
        target = self._bytes[copy.start : copy.start + nbytes].view(dtype).view(copy.sizes)
        if source.dtype == dtype and not dtype.is_complex:
            # As bits: no copy kernel exists for some narrow dtypes, and NaN payloads must survive.
            source, target = source.view(_BITS[dtype.itemsize]), target.view(_BITS[dtype.itemsize])
        with side.of(source):
            if source.is_cuda:
                source = source.to(target.dtype)
            target.copy_(source, non_blocking=source.is_cuda)

    def _pin(self) -> None:
        if not self._pinned:
            self._pinned = True
            # Without pinning the copy is slower but right, so a refusal is not an error.
            torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
                self._bytes.data_ptr(), self._bytes.numel(), 0
            )


class _SideStream:
    """Copies from CUDA run on a stream of their own, each after what the current stream holds when it begins."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def of(self, tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
        """A context for copies from ``tensor``; does nothing for host tensors."""
        if not tensor.is_cuda:
            return contextlib.nullcontext()
        stream = self._streams.get(tensor.device)
        if stream is None:
            stream = self._streams[tensor.device] = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        # For each piece: an iterator may have just computed this one.
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        tensor.record_stream(stream)
        return torch.cuda.stream(stream)

    def synchronize(self) -> None:
        """Wait until all copies are done."""
        for stream in self._streams.values():
            stream.synchronize()
