"""What the trainer's walks look at beside what the simulation's model does, at each change of the bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.sim.coordinators import SETTINGS
from tests.sim.errors import Violation
from tests.sim.model import RUN, Model
from weight_store.keys import parse_key
from weight_store.manifest import Manifest
from weight_store.records import record_format
from weight_store.version import Abort, Open

FASTEST = 1.05
"""How many seconds of a clock that goes too fast are in a true one, at most."""
LARGE_BYTES = 400


@dataclass
class WalkModel(Model):
    """Whether a version is as small as it should be, publications come in order, and nothing expires early."""

    may_be_full: Callable[[Manifest, Any], bool] = field(default=lambda *_: True)
    leapt: bool = False
    """Whether a coordinator may have counted seconds that never passed."""
    opened: dict[int, tuple[float, Open]] = field(default_factory=dict)

    def wrote(self, key: str, before: bytes | None, after: bytes) -> None:
        super().wrote(key, before, after)
        if not key.startswith(f"{RUN}/"):
            return
        parsed = parse_key(key)
        if parsed.kind == "open":
            self._opens(Open.parse(after))
        elif parsed.kind == "manifest" and record_format(after) == Abort.FORMAT:
            self._gives_up(Abort.parse(after))

    def _opens(self, opened: Open) -> None:
        mine = [known for _, known in self.opened.values() if known.run_id == opened.run_id]
        later = [known.version for known in mine if known.term == opened.term and known.ordinal >= opened.ordinal]
        if later:
            raise Violation(f"publication {opened.ordinal} of term {opened.term} is opened after version {later}")
        self.opened[opened.version] = self.bucket._loop.time(), opened

    def _gives_up(self, abort: Abort) -> None:
        opened_s, opened = self.opened.get(abort.version, (0.0, None))
        if opened is None or opened.run_id != abort.run_id:
            return  # decided while the run was being deleted
        after_s = self.bucket._loop.time() - opened_s
        if abort.reason == "expired" and not self.leapt and after_s < SETTINGS.expire_after_s / FASTEST:
            raise Violation(f"version {abort.version} expired {after_s:g} s after it was opened")

    def _check_content(self, manifest: Manifest, weights: Any) -> None:
        super()._check_content(manifest, weights)
        if self.may_be_full(manifest, weights):
            return
        parent = self._manifest(manifest.parent)
        for rank, ref in enumerate(manifest.receipts):
            receipt = self._receipt(manifest.version, rank, ref, extra_full=False)
            large = [entry for entry in receipt.full if receipt.sizes[entry] > LARGE_BYTES]
            if large and parent.layout == manifest.layout:
                raise Violation(f"rank {rank} sent groups {large} of version {manifest.version} whole")
