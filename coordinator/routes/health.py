"""For load balancers and supervisors."""

from __future__ import annotations

import logging

from fastapi import APIRouter

from coordinator.errors import BucketRefused, BucketUnavailable
from coordinator.problems import from_store_error, responses
from coordinator.routes.parameters import Service
from coordinator.wire import HealthAnswer
from weight_store.errors import WeightStoreError

logger = logging.getLogger(__name__)

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="Alive")
async def healthz() -> HealthAnswer:
    """Answer as long as the process can: a failure means that it should be restarted."""
    return HealthAnswer(status="ok")


@router.get("/readyz", summary="Ready", responses=responses(BucketUnavailable, BucketRefused))
async def readyz(service: Service) -> HealthAnswer:
    """Answer 200 if the object store answers: a failure means that requests should go elsewhere for now."""
    try:
        await service.ready()
    except WeightStoreError as error:
        # Anybody may ask this, and the sentence names bucket and endpoint.
        logger.warning("not ready: %s", error)
        raise type(from_store_error(error))("the object store cannot be used; the coordinator's log says why") from None
    return HealthAnswer(status="ok")
