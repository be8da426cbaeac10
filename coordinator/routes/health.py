"""For load balancers and supervisors."""

from __future__ import annotations

from fastapi import APIRouter

from coordinator.errors import BucketRefused, BucketUnavailable
from coordinator.problems import responses
from coordinator.routes.parameters import Service
from coordinator.wire import HealthAnswer

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="Alive")
async def healthz() -> HealthAnswer:
    """Answer as long as the process can: a failure means that it should be restarted."""
    return HealthAnswer(status="ok")


@router.get("/readyz", summary="Ready", responses=responses(BucketUnavailable, BucketRefused))
async def readyz(service: Service) -> HealthAnswer:
    """Answer 200 if the object store answers: a failure means that requests should go elsewhere for now."""
    await service.ready()
    return HealthAnswer(status="ok")
