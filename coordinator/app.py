"""The coordinator as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from importlib.metadata import version

from fastapi import FastAPI

from coordinator import problems
from coordinator.ambient import Ambient, Settings
from coordinator.checking import StoreCheck
from coordinator.guard import Guard
from coordinator.limits import BodyLimit
from coordinator.routes import fleets, health, page, readers, trainers
from coordinator.service import Coordinator
from coordinator.tokens import TokenFile
from weight_store.store import Store

_DESCRIPTION = """
Seals the versions that trainer ranks publish and announces them to rollout agents. The object store is the only durable
truth: any number of coordinators may serve one bucket, and one that starts empty recovers everything from it.

Errors are problem bodies (RFC 9457) with a stable `code` and a sentence in `detail` that says what to do. Whatever is
asked about runs may get 503 (`store-unavailable`, `too-busy`: ask again) or 500 (`store-refused`, `bucket-damaged`,
`internal`: a person must act). Unless it serves its own machine alone, the coordinator wants a token (`Authorization:
Bearer ...`) with the scope of the route.
"""


def create_app(
    store: Store,
    *,
    settings: Settings | None = None,
    ambient: Ambient | None = None,
    tokens: TokenFile | None = None,
    local_only: bool = False,
    check: StoreCheck | None = None,
) -> FastAPI:
    """Return the application for one bucket. The caller closes ``store``; the tending loop runs with the lifespan.

    With ``tokens`` every route takes the scope that access.py gives it. Without, everybody who gets through to it may
    do everything; ``local_only`` then refuses what was not addressed to this machine. Before ``check`` has passed
    nothing is read from the store, and nothing decided; without one ``store`` is taken to be fit.
    """
    coordinator = Coordinator(store, settings=settings, ambient=ambient)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tending = asyncio.create_task(_tend(coordinator, check), name="tend runs")
        try:
            yield
        finally:
            coordinator.registry.stop_waiting()
            tending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await tending

    app = FastAPI(
        title="weightcast coordinator",
        version=version("weightcast"),
        description=_DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        # routes/page.py serves these.
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.coordinator = coordinator
    problems.install(app)
    app.add_middleware(BodyLimit)
    app.add_middleware(Guard, tokens=tokens, local_only=local_only, check=check)
    for module in (trainers, readers, fleets, health, page):
        app.include_router(module.router)
    return app


async def _tend(coordinator: Coordinator, check: StoreCheck | None) -> None:
    if check is not None:
        await check.wait()
    await coordinator.registry.run_forever()
