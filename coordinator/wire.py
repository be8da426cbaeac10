"""What goes over HTTP: request and response bodies of the coordinator's API. No logic, no I/O."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from weight_store.control import RegionName
from weight_store.head import MAX_TERM, Launch, Term
from weight_store.position import Position
from weight_store.records import Count, Rank, Sha256, Uuid, Version
from weight_store.version import WorldSize

AgentId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]
VersionState = Literal["undecided", "sealed", "aborted"]
ReplicaState = Literal["starting", "fetching", "staged", "serving", "failed"]


MAX_SENTENCE = 1000
"""Characters of the sentence with which a rank withdraws."""


class Body(BaseModel):
    """Requests refuse unknown fields, so that a misspelt one is an error and not a default.

    They also refuse Infinity and NaN, which are no JSON: an answer that repeats one could be read by nobody.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Answer(BaseModel):
    """Responses may grow; clients ignore what they do not know."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class TermRequest(Body):
    """``POST /v1/runs/{run}/terms``. Rank 0 takes over; the others (``takeover`` false) wait for its launch.

    ``expected_term``: the term that rank 0 saw before it first asked (0: no run yet). The run is taken over from that
    term only, so that a request that comes late, or again, cannot take it from a launch that was quicker.
    """

    launch: Launch
    takeover: bool = True
    expected_term: Annotated[int, Field(ge=0, le=MAX_TERM)] | None = None
    wait_s: Annotated[float, Field(ge=0, le=60)] = 0


class TermAnswer(Answer):
    """The term of a launch and the position it starts from (version 0: no weights yet)."""

    run: str
    run_id: Uuid
    term: Term
    launch: Launch
    position: Position


class OfferReport(Body):
    """``PUT /v1/runs/{run}/terms/{term}/offers/{rank}``: the offer is in the bucket."""

    world_size: WorldSize


class LayoutAnswer(Answer):
    """``GET /v1/runs/{run}/terms/{term}/layout?world_size=&wait=``: the layout, or the ranks still missing."""

    layout: Sha256 | None
    world_size: WorldSize
    missing: tuple[Rank, ...] = ()


class OfTerm(Body):
    """What a rank asks as one of the launch that holds ``term`` of run ``run_id``.

    A run that was deleted and begun again counts its terms from 1 again: without ``run_id`` a launch of the former run
    would be taken for the one that holds the term now.
    """

    term: Term
    run_id: Uuid | None = None


class OpenRequest(OfTerm):
    """``POST /v1/runs/{run}/versions``: every rank of a term asks; all get the same version."""

    step: Count
    ordinal: Count
    layout: Sha256
    world_size: WorldSize


class ReceiptReport(OfTerm):
    """``PUT .../versions/{v}/receipts/{rank}``: the receipt is in the bucket. Timings are for people only."""

    sha256: Sha256
    encode_s: Annotated[float, Field(ge=0)] = 0
    upload_s: Annotated[float, Field(ge=0)] = 0


class ProgressReport(OfTerm):
    """``PUT .../versions/{v}/progress/{rank}``: bytes move, the receipt is yet to come."""


class WithdrawalReport(OfTerm):
    """``PUT .../versions/{v}/withdrawals/{rank}``: the rank cannot send its shard, for good, and why."""

    code: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,63}$")]
    sentence: Annotated[str, StringConstraints(max_length=MAX_SENTENCE)]


class RegionVersion(Answer):
    """How far one region is with one version. ``lag_s``: seconds since sealing while not all agents serve it."""

    region: RegionName
    agents: int
    staged: int
    serving: int
    lag_versions: int
    lag_s: float


class VersionAnswer(Answer):
    """One version. ``position`` once sealed; ``reason`` once aborted; ``missing`` ranks while undecided."""

    run: str
    run_id: Uuid
    version: Version
    term: Term
    step: Count
    ordinal: Count
    state: VersionState
    parent: Position
    layout: Sha256
    world_size: WorldSize
    position: Position | None = None
    reason: str = ""
    missing: tuple[Rank, ...] = ()
    receipts: int = 0
    payload_bytes: Count = 0
    changed: Count = 0
    elements: Count = 0
    weight_bytes: Count = 0
    full_version: Version = 0
    encode_s: float = 0
    upload_s: float = 0
    seal_s: float = 0
    regions: tuple[RegionVersion, ...] = ()


class RegionsEvent(Answer):
    """Data of the ``regions`` event: how far each region is with the head's version."""

    version: Version
    regions: tuple[RegionVersion, ...]


class HeadAnswer(Answer):
    """``GET .../head?after=V&wait=S``: where the head is."""

    run: str
    run_id: Uuid
    term: Term
    position: Position
    step: Count = 0


class AgentReport(Body):
    """``PUT .../regions/{region}/agents/{id}``: a rollout agent's heartbeat (at least every ``ttl_s / 3``)."""

    run_id: Uuid
    state: ReplicaState
    staged: Position | None = None
    serving: Position | None = None
    error: Annotated[str, StringConstraints(max_length=1000)] = ""
    fetched_bytes: Count = 0
    apply_s: Annotated[float, Field(ge=0)] = 0
    ttl_s: Annotated[float, Field(gt=0, le=3600)] = 30


class AgentAnswer(Answer):
    """A heartbeat as last received, ``age_s`` seconds ago."""

    id: AgentId
    region: RegionName
    age_s: float
    report: AgentReport


class RegionAnswer(Answer):
    """A region, its live agents and its target (reserved for what it shall run: agents follow the head)."""

    region: RegionName
    target: Version | None = None
    agents: tuple[AgentAnswer, ...]


class RunAnswer(Answer):
    """One run: head, the undecided version if any, regions."""

    run: str
    run_id: Uuid
    term: Term
    launch: Launch
    position: Position
    undecided: Version | None = None
    regions: tuple[RegionAnswer, ...] = ()


class WaitAnswer(Answer):
    """``GET .../wait``: whether the condition held before the time-out, and how far each region is."""

    reached: bool
    version: Version
    regions: tuple[RegionVersion, ...]
    run_id: Uuid | None = None


class HealthAnswer(Answer):
    """``GET /healthz`` and ``GET /readyz``."""

    status: Literal["ok"]


class Problem(Answer):
    """RFC 9457 problem details; ``code`` is the stable error code of the package that raised it."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    code: str
