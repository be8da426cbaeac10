"""Steps in words, for the log."""

from __future__ import annotations

from coordinator.decisions import CreateOpen, CreateRegister, ReplaceHead, Step
from weight_store.manifest import Manifest
from weight_store.version import Abort


def told(step: Step) -> str:
    """What was written."""
    match step:
        case CreateOpen(opened):
            return f"opened version {opened.version} (term {opened.term}, step {opened.step}) on {opened.parent}"
        case CreateRegister(Manifest() as manifest):
            return f"version {manifest.version}: all receipts are there, {manifest.payload_bytes} bytes"
        case CreateRegister(Abort() as abort):
            return f"gave version {abort.version} up ({abort.reason}): {abort.detail}"
        case ReplaceHead(head):
            return f"head is term {head.term}, position {head.position}, launch {head.launch}"
        case _:
            return f"created ({type(step).__name__})"
