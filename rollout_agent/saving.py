"""The checkpoint in the making: what a reboot will find, brought to one version while later ones are being applied.

Nothing waits for it. It is made in steps, and between any two of them, and during them, later versions may be stored
into the very files that it reads or syncs. What it leaves is then a mixture of its own version and later ones, and
that is safe:

- A byte of a later version is stored only after that version's log is durable, and this checkpoint keeps every log
  later than its version. So each byte of the mixture that is not of its version lies where a durable log has a value.
- Values in logs are absolute, so replaying the later logs in order gives the newest version over any mixture.
- Until the state record names this checkpoint, the former one counts: its logs are all still there, and bringing its
  copy forward stores only values of those logs.
- Files that were replaced (a version installed as new files) make it void: it is dropped, not recorded.
- Start-up compares digests after the replay, so an error in this argument would cost a refetch, never a mixture.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import nullcontext

from rollout_agent import syncing
from rollout_agent.disk import Disk, copy_file, sync_file
from rollout_agent.errors import DamagedFiles, DiskError
from rollout_agent.places import Places, checkpoint_name
from rollout_agent.replaying import stores_of
from rollout_agent.state import State, load
from rollout_agent.statedir import Held, KeptLog, StateDir
from rollout_agent.weights import Weights

_LOG = logging.getLogger(__name__)


class Saving:
    """One checkpoint of the version ``held``; its steps touch nothing that following a run depends on.

    ``files`` is the record of the files in place, ``logs`` lead on from it to ``held``. ``copies``: what survives is a
    copy of the weights in the state directory, not the weights themselves.
    """

    def __init__(
        self,
        disk: Disk,
        places: Places,
        records: StateDir,
        *,
        held: Held,
        files: State,
        logs: Sequence[KeptLog],
        weights: Weights,
        copies: bool,
    ) -> None:
        self._disk = disk
        self._places = places
        self._records = records
        self._table = weights.table
        self.files = files
        self.layout = held.layout
        self.logs = tuple(logs)
        self.copies = copies
        self._afresh = copies and not files.checkpoint
        name = files.checkpoint if copies else ""
        if self._afresh:
            # Never the one that counts until the record says otherwise, bad as it may be: most of it is right.
            name = checkpoint_name(held.position.version, self._recorded())
        self._directory = places.state / name if copies else places.model
        self.state = files.model_copy(
            update={"version": held.version, "digests": b"".join(held.digests).hex(), "checkpoint": name}
        )
        """The record that makes this the checkpoint, once all steps are done."""
        self._steps = self._copy() if self._afresh else self._bring_forward()

    def step(self) -> bool:
        """Do a part of the work, in any thread; False once all is done. Raises ``DiskError`` or ``DamagedFiles``."""
        return next(self._steps, None) is not None

    def close(self) -> None:
        """Release what the steps hold. Calling it twice is allowed."""
        self._steps.close()

    def drop(self) -> None:
        """Give up: remove a copy that no record names, for the logs need the space."""
        if self._afresh and self._directory.name != self._recorded():
            try:
                self._disk.remove_dir(self._directory)
            except DiskError as error:
                _LOG.warning("an unfinished checkpoint stays behind: %s", error)

    def _recorded(self) -> str:
        """Name of the copy that a reboot would find now; empty if there is none."""
        recorded = load(self._disk, self._places.checkpoint, State, quiet=True)
        return recorded.checkpoint if recorded is not None else ""

    def _copy(self) -> Generator[str]:
        self._records.drop_copies(self._recorded())
        self._disk.make_dir(self._directory)
        # All space is taken at once: a disk that is too small is found full before it is filled.
        for file in self._table.files:
            self._disk.allocate(self._directory / file.name, file.size)
            yield file.name
        for file in self._table.files:
            for _ in copy_file(self._disk, self._places.model / file.name, self._directory / file.name):
                yield file.name
            sync_file(self._disk, self._directory / file.name)
            yield file.name
        self._disk.sync_dir(self._directory)

    def _bring_forward(self) -> Generator[str]:
        # Mapped apart from the weights that versions are stored into: those may be closed at any moment.
        weights = Weights(self._disk, self._directory, self._table)
        try:
            if self.copies and weights.edited_heads():
                raise DamagedFiles(f"{self._directory} is damaged: a file in it begins differently")
            for log in self.logs if self.copies else ():
                with stores_of(self._disk, self._records, log.path, weights) as stores:
                    for store in stores:
                        store()
                        yield log.path.name
            # A copy whose sync failed is brought forward again from where it was: all that was lost is stored again.
            with nullcontext() if self.copies else syncing.noted(self._disk, self._places.syncing):
                yield from weights.sync_each()
                # Where somebody put another file in the place of one, it is that which was found right.
                self._disk.sync_dir(self._directory)
        finally:
            weights.close()
