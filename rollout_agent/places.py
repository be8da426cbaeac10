"""Where everything lies on the local disk. Names come from numbers and digests, never from the bucket's tensor names.

::

    <model dir>/
        model-00001-of-00002.safetensors ...   working weights
        model.safetensors.index.json           there only while the weights are whole
        config.json, tokenizer files           assets of the run
        .weightcast/
            owner.json      run that the directory belongs to, which files are assets of it, and its state directory
            whole.json      which version the directory holds, in which boot and files; there only while it is whole
            digests.json    what each group of that version should be, for whoever checks the files
            layouts/        the layout that says what a group is
            serving.json    which version the engine confirmed last
            told.json       which version an engine was told of and has not answered to
            gate.lock       flock: shared while an engine loads, exclusive while weights change
            gate.turn       flock: a waiting agent holds it, so that readers cannot starve it
            gate.doubt      flock: shared while an engine waits that found files wrong, so that the agent looks
            gate.told       flock: exclusive while a command runs that was told of a version, its agent alive or not
            agent.lock      flock: one agent a model directory, whatever state directory it was told
            syncing.json    the weight files are being synced, or failed to be
            hidden/         index and config.json while weights change
            new/            files of a version that is not committed yet; with a syncing.json of their own
    <state dir>/            by default <model dir>/.weightcast/state
        agent.lock          flock: one agent a state directory
        state.json          the checkpoint: from here logs are replayed
        pending.json        files of this version are complete; it supersedes the checkpoint
        change-<version>.log
        layouts/<sha256>, assets/<sha256>
        checkpoint-<version>/   copy of the weights, if the model directory does not survive a reboot; with -2 at the
                                end of its name if it was made to replace one of the same version
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
HIDDEN = (INDEX, CONFIG)
"""An engine finds a model by these two; they are away while the weights are between two versions."""

_LOG = re.compile(r"change-(\d{12})\.log")
_WEIGHTS = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
CHECKPOINT = r"checkpoint-\d{12}(?:-2)?"
"""What :func:`checkpoint_name` gives, as a regular expression."""
_CHECKPOINT = re.compile(CHECKPOINT)


def weights_name(number: int, total: int) -> str:
    """Name of the ``number``-th (from 1) of ``total`` weight files."""
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def is_weights_name(name: str) -> bool:
    """Whether an agent may have given a file this name."""
    return _WEIGHTS.fullmatch(name) is not None


def log_version(name: str) -> int | None:
    """Version that the log of this name leads to; None if it is no log."""
    match = _LOG.fullmatch(name)
    return int(match[1]) if match else None


def checkpoint_name(version: int, taken: str = "") -> str:
    """Name of the directory that a copy of the weights starts to be made in at ``version``; never ``taken``."""
    name = f"checkpoint-{version:012d}"
    return name if name != taken else f"{name}-2"


def is_checkpoint_name(name: str) -> bool:
    """Whether this is the name of a checkpoint's directory."""
    return _CHECKPOINT.fullmatch(name) is not None


@dataclass(frozen=True)
class Places:
    """The paths of one agent; both directories absolute."""

    model: Path
    state: Path

    @classmethod
    def of(cls, model_dir: Path, state_dir: Path | None = None) -> Places:
        """Places for a model directory and, if given, a state directory elsewhere (on a disk that lasts)."""
        model = model_dir.absolute()
        return cls(model, state_dir.absolute() if state_dir else model / ".weightcast" / "state")

    @cached_property
    def private(self) -> Path:
        """What engines do not look at."""
        return self.model / ".weightcast"

    @cached_property
    def owner(self) -> Path:
        """The run that the directory belongs to, and which files are assets of it."""
        return self.private / "owner.json"

    @cached_property
    def whole(self) -> Path:
        """The mark that the directory is whole."""
        return self.private / "whole.json"

    @cached_property
    def digests(self) -> Path:
        """What each group of the version held should be."""
        return self.private / "digests.json"

    def shown_layout(self, sha256: str) -> Path:
        """The layout by which :attr:`digests` is read."""
        return self.private / "layouts" / sha256

    @cached_property
    def serving(self) -> Path:
        """What the engine confirmed."""
        return self.private / "serving.json"

    @cached_property
    def told(self) -> Path:
        """What an engine was told and has not answered to."""
        return self.private / "told.json"

    @cached_property
    def syncing(self) -> Path:
        """That the weight files are being synced, or failed to be."""
        return self.private / "syncing.json"

    @cached_property
    def new_syncing(self) -> Path:
        """The same of the files in :attr:`new`."""
        return self.new / "syncing.json"

    @cached_property
    def gate_lock(self) -> Path:
        """Lock between engines and the agent."""
        return self.private / "gate.lock"

    @cached_property
    def gate_turn(self) -> Path:
        """Lock that gives a waiting agent its turn."""
        return self.private / "gate.turn"

    @cached_property
    def gate_doubt(self) -> Path:
        """Lock by which an engine that found files wrong asks the agent to look."""
        return self.private / "gate.doubt"

    @cached_property
    def gate_told(self) -> Path:
        """Lock of a command that was told of a version: it may read the files also when its agent has ended."""
        return self.private / "gate.told"

    @cached_property
    def hidden(self) -> Path:
        """Where index and config are while weights change."""
        return self.private / "hidden"

    @cached_property
    def new(self) -> Path:
        """Files in the making; on the model directory's file system."""
        return self.private / "new"

    @cached_property
    def agent_locks(self) -> tuple[Path, Path]:
        """Locks of the one agent: of its model directory and of its state directory."""
        return self.private / "agent.lock", self.state / "agent.lock"

    @cached_property
    def checkpoint(self) -> Path:
        """The state record."""
        return self.state / "state.json"

    @cached_property
    def pending(self) -> Path:
        """The state record of installed files that are not checkpointed."""
        return self.state / "pending.json"

    def log(self, version: int) -> Path:
        """The log that leads to ``version``."""
        return self.state / f"change-{version:012d}.log"

    @cached_property
    def layouts(self) -> Path:
        """Layouts kept for replay."""
        return self.state / "layouts"

    @cached_property
    def assets(self) -> Path:
        """Assets kept for restoring them."""
        return self.state / "assets"

    def layout(self, sha256: str) -> Path:
        """A layout kept for replay."""
        return self.layouts / sha256

    def asset(self, sha256: str) -> Path:
        """An asset kept for restoring it."""
        return self.assets / sha256
