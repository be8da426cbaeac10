"""Path and query parameters that several routes share, and how a route gets at the service."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Query, Request

from coordinator.service import Coordinator
from coordinator.wire import AgentId
from weight_store.control import RegionName
from weight_store.head import MAX_TERM
from weight_store.records import MAX_RANKS, MAX_VERSION


def _service(request: Request) -> Coordinator:
    service = request.app.state.coordinator
    if not isinstance(service, Coordinator):
        raise TypeError("the app was not made by create_app")
    return service


Service = Annotated[Coordinator, Depends(_service)]
RunName = Annotated[
    str,
    Path(
        description="Name of the run: 1 to 63 of a-z, 0-9, '.', '_' and '-'.",
        max_length=63,
        # Described only: what checks it (weight_store.keys) says more than "does not match".
        json_schema_extra={"pattern": "^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$"},
    ),
]
TermNumber = Annotated[int, Path(description="Term, as answered by the takeover.", ge=1, le=MAX_TERM)]
VersionNumber = Annotated[int, Path(description="Version, as assigned when it was opened.", ge=1, le=MAX_VERSION)]
RankNumber = Annotated[int, Path(description="Rank of the reporting trainer process.", ge=0, lt=MAX_RANKS)]
Region = Annotated[RegionName, Path(description="Region of the agent: lower-case letters, digits and '-'.")]
Agent = Annotated[AgentId, Path(description="Stable name of the agent within its region.")]
WorldSizeQuery = Annotated[int, Query(description="World size of the launch.", ge=1, le=MAX_RANKS)]
Wait = Annotated[float, Query(description="Seconds to wait for it (long poll); 0 answers at once.", ge=0, le=60)]
