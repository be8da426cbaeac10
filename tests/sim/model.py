"""The promises, checked at every change of the bucket and of a disk against a dictionary of what trainers published.

``published`` says what the weights of each publication are; the head's moves say which publication became which
version. Everything else is compared with that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np

import codec
from rollout_agent.places import INDEX
from tests.rollout_agent.training import Weights, group_bits
from tests.sim.errors import Violation
from tests.sim.store import Bucket
from weight_store.chain import plan_chain
from weight_store.errors import WeightStoreError
from weight_store.head import Head
from weight_store.keys import (
    ParsedKey,
    asset_key,
    layout_key,
    manifest_key,
    open_key,
    parse_key,
    receipt_key,
    shard_key,
)
from weight_store.layout import Layout
from weight_store.manifest import Manifest, ReceiptRef
from weight_store.position import GENESIS, Position
from weight_store.receipt import Asset, Receipt, group_ranges
from weight_store.records import record_format, sha256_hex, unpack
from weight_store.version import Abort, Open

RUN = "sim"


@dataclass(frozen=True)
class SealedVersion:
    """A version that the head came to."""

    position: Position
    parent: Position
    launch: str
    term: int
    ordinal: int
    weights: Weights
    tensors: dict[str, bytes]
    assets: tuple[Asset, ...]


@dataclass
class Model:
    """Watches one run's bucket. ``min_age_s``: of garbage collection; ``now`` virtual seconds."""

    bucket: Bucket
    min_age_s: float
    head: Head | None = None
    published: dict[tuple[str, int], Weights] = field(default_factory=dict)
    launches: dict[int, str] = field(default_factory=dict)
    sealed: dict[int, SealedVersion] = field(default_factory=dict)
    decided: dict[int, str] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    _superseded: list[tuple[float, Head]] = field(default_factory=list)
    _reach: dict[Position, frozenset[str]] = field(default_factory=dict)

    # ---- what trainers and readers report

    def publishes(self, launch: str, ordinal: int, weights: Weights) -> None:
        """The weights of a launch's publication."""
        self.published[launch, ordinal] = weights

    def check_visible(
        self, who: str, version: int, tensors: dict[str, bytes], least: int, wanted: frozenset[str] = frozenset()
    ) -> None:
        """What an engine would load: exactly the weights of a sealed version, and none before ``least``.

        ``wanted``: names of which none may be missing, if not all are kept; what comes with them must be right too.
        """
        if version not in self.sealed:
            raise Violation(f"{who} shows version {version}, which was never sealed")
        if version < least:
            raise Violation(f"{who} shows version {version} after version {least}")
        expected = self.sealed[version].tensors
        if wanted:
            expected = {name: raw for name, raw in expected.items() if name in wanted or name in tensors}
        if tensors != expected:
            wrong = sorted(name for name in expected.keys() | tensors if expected.get(name) != tensors.get(name))
            raise Violation(f"{who} shows other weights than those of version {version}: {', '.join(wrong)}")

    def check_beside(self, who: str, version: int, tensors: dict[str, bytes], beside: dict[str, bytes]) -> None:
        """The files beside the weights are those of the version, and the index names each tensor that is there."""
        for asset in self.sealed[version].assets:
            if sha256_hex(beside.get(asset.name, b"")) != asset.sha256:
                raise Violation(f"{who} shows another {asset.name} than that of version {version}")
        try:
            index = json.loads(beside.get(INDEX, b"{}"))
        except ValueError as error:
            raise Violation(f"{who} cannot read the files of version {version}: {INDEX}: {error}") from None
        if index.get("weight_map", {}).keys() != tensors.keys():
            raise Violation(f"{who} shows version {version} with an index that names other tensors")

    def check_outcome(self, launch: str, ordinal: int, version: int | None, code: str | None) -> None:
        """What a trainer was told about a publication: sealed as ``version``, or failed with ``code``."""
        found = [v for v, s in self.sealed.items() if (s.launch, s.ordinal) == (launch, ordinal)]
        if code is None and found != [version]:
            raise Violation(f"{launch} was told that publication {ordinal} is version {version}; it is {found}")
        if code == "version-aborted" and found:
            raise Violation(f"{launch} was told that publication {ordinal} was given up; it is version {found[0]}")

    # ---- changes of the bucket

    def wrote(self, key: str, before: bytes | None, after: bytes) -> None:
        """See :class:`~tests.sim.store.Watcher`."""
        if not key.startswith(f"{RUN}/") or before == after:
            return
        parsed = parse_key(key)
        if parsed.kind == "head":
            self._head_moves(None if before is None else Head.parse(before), Head.parse(after))
        elif parsed.kind == "manifest":
            self._decides(parsed.version or 0, before, after)
        elif parsed.kind != "control" and before is not None:
            raise Violation(f"{key} was written twice")

    def _decides(self, version: int, before: bytes | None, after: bytes) -> None:
        kind = "abort" if record_format(after) == Abort.FORMAT else "manifest"
        if before is not None or version in self.decided:
            raise Violation(f"version {version} was decided twice: {self.decided.get(version)}, then {kind}")
        self.decided[version] = kind

    def _head_moves(self, before: Head | None, after: Head) -> None:
        if before is None:
            if self.head is not None or after.position != GENESIS or after.term != 1:
                raise Violation(f"the head appears at term {after.term}, {after.position}")
        elif before.term != after.term:
            if (after.term, after.position) != (before.term + 1, before.position):
                raise Violation(f"a takeover moves the head from {before} to {after}")
            if after.launch in self.launches.values():
                raise Violation(f"launch {after.launch} took the run a second time")
        else:
            self._seals(before, after)
        if before is not None:
            self._superseded.append((self.bucket._loop.time(), before))
        self.head = after
        self.launches[after.term] = after.launch

    def _seals(self, before: Head, after: Head) -> None:
        where = f"the head moves from {before.position} to {after.position} in term {after.term}"
        manifest = self._manifest(after.position)
        if after.launch != before.launch or after.run_id != before.run_id:
            raise Violation(f"{where} and changes its owner")
        if manifest.parent != before.position:
            raise Violation(f"{where}, whose parent is {manifest.parent}")
        if manifest.term != after.term:
            raise Violation(f"{where}, a version of term {manifest.term}: a zombie sealed it")
        launch = self.launches[manifest.term]
        twice = [v for v, s in self.sealed.items() if (s.term, s.ordinal) == (manifest.term, manifest.ordinal)]
        if twice:
            raise Violation(f"{where}: publication {manifest.ordinal} was version {twice[0]} already")
        weights = self.published.get((launch, manifest.ordinal))
        if weights is None:
            raise Violation(f"{where}: {launch} never published {manifest.ordinal}")
        self._check_content(manifest, weights)
        tensors = {name: np.ascontiguousarray(bits).tobytes() for name, bits in weights.items()}
        self.sealed[manifest.version] = SealedVersion(
            after.position, manifest.parent, launch, manifest.term, manifest.ordinal, weights, tensors, manifest.assets
        )

    def _check_content(self, manifest: Manifest, weights: Weights) -> None:
        """Decode every rank's shard from the parent's weights: it must give what was published."""
        layout = self._layout(manifest.layout)
        parent = self.sealed.get(manifest.parent.version)
        for rank, ref in enumerate(manifest.receipts):
            receipt = self._receipt(manifest.version, rank, ref, extra_full=False)
            if receipt.parent != manifest.parent:
                raise Violation(f"rank {rank} encoded version {manifest.version} against {receipt.parent}")
            self._check_shard(receipt, layout, None if parent is None else parent.weights, weights)
        if manifest.extra_full:
            full = self.sealed[manifest.full_version]
            receipts = [
                self._receipt(manifest.full_version, rank, ref, extra_full=True)
                for rank, ref in enumerate(manifest.extra_full)
            ]
            for receipt in receipts:
                self._check_shard(receipt, self._layout(receipt.layout), None, full.weights)

    def _check_shard(self, receipt: Receipt, layout: Layout, base: Weights | None, weights: Weights) -> None:
        key = shard_key(RUN, receipt.version, receipt.rank, receipt.nonce, extra_full=receipt.extra_full)
        shard = self._bytes(key)
        for item in group_ranges(receipt, layout):
            group = item.group
            payload = shard[item.offset : item.offset + item.size]
            before = None if item.full or base is None else group_bits(group, base)
            change = codec.decode_group(before, payload, group.dtype, group.elements)
            found = np.zeros(group.elements, np.dtype(f"u{group.itemsize}")) if before is None else before.copy()
            codec.apply_change(found, change)
            if found.tobytes() != group_bits(group, weights).tobytes():
                raise Violation(f"group {group.index} in {key} is not what was published as version {receipt.version}")

    # ---- deletions

    def deleted(self, key: str) -> None:
        """Nothing may go that a reader who follows the head needs, or began to read not long ago."""
        if self.head is None or not key.startswith(f"{RUN}/"):
            return
        self.gone.add(key)
        now_s = self.bucket._loop.time()
        recent = [head for until_s, head in self._superseded if until_s > now_s - self.min_age_s]
        for head in (self.head, *recent):
            if head.position != GENESIS and key in self._reachable(head):
                raise Violation(f"{key} was deleted although the head at {head.position} leads there")
        parsed = parse_key(key)
        version = parsed.version or 0
        if version > self.head.position.version and version not in self.decided and not self._is_fenced(version):
            raise Violation(f"{key} was deleted although version {version} is undecided")

    def aborted(self, key: str) -> None:
        """No upload may be ended whose object could still count."""
        parsed = parse_key(key)
        version = parsed.version or 0
        if self.head is None:
            return
        if version > self.head.position.version and version not in self.decided and not self._is_fenced(version):
            raise Violation(f"an upload of {key} was ended although version {version} is undecided")
        if self.may_become_visible(parsed):
            raise Violation(f"an upload of {key} was ended although the full of version {version} is not superseded")

    def is_waste(self, key: str) -> bool:
        """Whether an unfinished upload of a decided version leads nowhere."""
        parsed = parse_key(key)
        at = 0 if self.head is None else self.head.position.version
        return (parsed.version or 0) <= at and not self.may_become_visible(parsed)

    def may_become_visible(self, parsed: ParsedKey) -> bool:
        """Whether a later manifest may list the extra full that an object is part of."""
        if self.head is None or not parsed.extra_full or parsed.version not in self.sealed:
            return False
        return parsed.version > self._manifest(self.head.position).full_version

    def _is_fenced(self, version: int) -> bool:
        opened = self.bucket.read(open_key(RUN, version))
        return opened is not None and self.head is not None and Open.parse(opened).term < self.head.term

    def _reachable(self, head: Head) -> frozenset[str]:
        found = self._reach.get(head.position)
        if found is None:
            found = self._reach[head.position] = frozenset(self._walk(head.position))
        return found

    def _walk(self, position: Position) -> set[str]:
        target = self._manifest(position)
        keys = {manifest_key(RUN, position.version)} | {asset_key(RUN, asset.sha256) for asset in target.assets}
        for hop in plan_chain(None, target, position):
            manifest = self._manifest(hop.position)
            keys.add(manifest_key(RUN, hop.position.version))
            extra = bool(hop.extra_full)
            for rank, ref in enumerate(hop.extra_full or manifest.receipts):
                receipt = self._receipt(hop.position.version, rank, ref, extra_full=extra)
                keys.add(receipt_key(RUN, receipt.version, rank, extra_full=extra))
                keys.add(shard_key(RUN, receipt.version, rank, receipt.nonce, extra_full=extra))
                keys.add(layout_key(RUN, receipt.layout))
        return keys

    # ---- reading

    def _bytes(self, key: str) -> bytes:
        data = self.bucket.read(key)
        if data is None:
            raise Violation(f"{key} is not there")
        return data

    def _manifest(self, position: Position) -> Manifest:
        key = manifest_key(RUN, position.version)
        data = self._bytes(key)
        if sha256_hex(data) != position.sha256:
            raise Violation(f"{key} is not the manifest of {position}")
        try:
            return Manifest.parse(data, key=key)
        except WeightStoreError as error:
            raise Violation(f"the head leads to {error}") from None

    def _receipt(self, version: int, rank: int, ref: ReceiptRef, *, extra_full: bool) -> Receipt:
        key = receipt_key(RUN, version, rank, extra_full=extra_full)
        data = self._bytes(key)
        if sha256_hex(data) != ref.sha256:
            raise Violation(f"{key} is not the receipt that the manifest names")
        return Receipt.parse(data, key=key)

    def _layout(self, sha256: str) -> Layout:
        return Layout.parse(unpack(self._bytes(layout_key(RUN, sha256))))
