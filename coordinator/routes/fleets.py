"""What rollout agents report, and what their reports amount to."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from coordinator.errors import BadRequest, BucketUnavailable, TooBusy, UnknownRun, VersionAborted, WrongRun
from coordinator.fleet import Stage
from coordinator.problems import responses
from coordinator.routes.parameters import Agent, Region, RunName, Service
from coordinator.wire import AgentAnswer, AgentReport, RegionAnswer, WaitAnswer
from weight_store.control import RegionName
from weight_store.records import MAX_VERSION

router = APIRouter(prefix="/v1/runs/{run}", tags=["fleet"])


@router.put(
    "/regions/{region}/agents/{agent}",
    summary="Heartbeat of a rollout agent",
    responses=responses(UnknownRun, WrongRun, BadRequest, TooBusy, BucketUnavailable),
)
async def heartbeat(run: RunName, region: Region, agent: Agent, report: AgentReport, service: Service) -> AgentAnswer:
    """Take note of what an agent has staged and serves. It counts for `ttl_s` seconds; nothing is stored."""
    return await service.heartbeat(run, region, agent, report)


@router.get("/regions", summary="Regions and their agents", responses=responses(UnknownRun, BucketUnavailable))
async def regions(run: RunName, service: Service) -> tuple[RegionAnswer, ...]:
    """Return the regions with live agents or a target."""
    return await service.regions(run)


@router.get(
    "/wait",
    summary="Wait until regions have a version",
    responses=responses(UnknownRun, VersionAborted, BadRequest, BucketUnavailable),
)
async def wait(
    run: RunName,
    service: Service,
    version: Annotated[int, Query(description="The version, or a later one.", ge=1, le=MAX_VERSION)],
    state: Annotated[Stage, Query(description="How far: sealed, staged (on the host) or serving.")] = "serving",
    regions: Annotated[
        str, Query(description="Regions, separated by commas; none: those known here.", max_length=4000)
    ] = "",
    quorum: Annotated[float, Query(description="Share of a region's live agents that is enough.", gt=0, le=1)] = 1.0,
    timeout_s: Annotated[
        float, Query(alias="timeout", description="Seconds after which to answer anyway.", ge=0, le=600)
    ] = 0,
) -> WaitAnswer:
    """Bound staleness: answer once every region has the version, or after `timeout` with how far they are.

    A coordinator that has just started listens to agents for 30 s before it says that staged or serving is reached.
    Name the regions where it matters: one without a live agent is not known.
    """
    return await service.wait(run, version, state, _regions(regions), quorum, timeout_s)


def _regions(text: str) -> list[RegionName]:
    return [name for name in (part.strip() for part in text.split(",")) if name]
