"""A bucket, coordinators on it, and trainers and agents that do by hand what the real ones do."""

from __future__ import annotations

import contextlib
import hashlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import uvicorn
from fastapi import FastAPI

from coordinator.ambient import Ambient, Settings
from coordinator.app import create_app
from coordinator.client import CoordinatorClient
from coordinator.service import Coordinator
from coordinator.wire import (
    AgentAnswer,
    AgentReport,
    LayoutAnswer,
    OfferReport,
    OpenRequest,
    ReceiptReport,
    TermAnswer,
    TermRequest,
    VersionAnswer,
)
from weight_store.errors import PreconditionFailed
from weight_store.keys import offer_key, receipt_key
from weight_store.layout import Layout
from weight_store.memory import MemoryStore
from weight_store.offer import Offer
from weight_store.position import Position
from weight_store.reading import read_layout
from weight_store.receipt import BLOCK_BYTES, SHARD_MAGIC, Receipt
from weight_store.records import pack, sha256_hex
from weight_store.store import Store
from weightcast.cli import main

RUN = "demo"


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class Node:
    """One coordinator, and a client that talks to it over its real HTTP application."""

    app: FastAPI
    client: CoordinatorClient

    @property
    def service(self) -> Coordinator:
        service = self.app.state.coordinator
        assert isinstance(service, Coordinator)
        return service

    async def tick(self) -> None:
        await self.service.registry.tick()


@dataclass
class Job:
    """One launch of a training job: the ranks of one world, each holding row ``rank`` of every tensor."""

    store: Store
    client: CoordinatorClient
    launch: str
    world_size: int = 2
    run: str = RUN
    rows: int = 4
    names: tuple[str, ...] = ("layers.0.w", "layers.1.w")
    term: TermAnswer | None = None
    layout: Layout | None = None
    layout_sha256: str = ""
    published: int = 0

    async def start(self) -> Job:
        """Take the run over, offer all boxes and learn the layout."""
        self.term = await self.client.takeover(self.run, TermRequest(launch=self.launch))
        for rank in range(self.world_size):
            answer = await self.offer(rank)
        assert answer.layout is not None
        self.layout_sha256 = answer.layout
        self.layout = await read_layout(self.store, self.run, answer.layout)
        return self

    def make_offer(self, rank: int, **changes: object) -> Offer:
        assert self.term is not None
        count, rows = len(self.names), self.rows
        fields: dict[str, object] = {
            "run_id": self.term.run_id,
            "term": self.term.term,
            "rank": rank,
            "world_size": self.world_size,
            "names": self.names,
            "dtypes": ("BF16",) * count,
            "itemsizes": (2,) * count,
            "shapes": ((rows * self.world_size, 8),) * count,
            "offsets": ((rows * rank, 0),) * count,
            "sizes": ((rows, 8),) * count,
        }
        return Offer(**{**fields, **changes})  # type: ignore[arg-type]

    async def offer(self, rank: int, **changes: object) -> LayoutAnswer:
        assert self.term is not None
        offer = self.make_offer(rank, **changes)
        with contextlib.suppress(PreconditionFailed):
            await self.store.create(offer_key(self.run, self.term.term, rank), pack(offer.to_bytes()))
        return await self.client.report_offer(self.run, self.term.term, rank, OfferReport(world_size=self.world_size))

    async def open(
        self, step: int, ordinal: int | None = None, *, at: CoordinatorClient | None = None
    ) -> VersionAnswer:
        assert self.term is not None
        request = OpenRequest(
            term=self.term.term,
            step=step,
            ordinal=self.published if ordinal is None else ordinal,
            layout=self.layout_sha256,
            world_size=self.world_size,
        )
        return await (at or self.client).open_version(self.run, request)

    def make_receipt(self, opened: VersionAnswer, rank: int, **changes: object) -> Receipt:
        assert self.layout is not None
        groups = self.layout.owned(rank)
        shard = SHARD_MAGIC + bytes([rank % 256]) * sum(8 for _ in groups)
        blocks = [hashlib.sha256(shard[i : i + BLOCK_BYTES]).hexdigest() for i in range(0, len(shard), BLOCK_BYTES)]
        fields: dict[str, object] = {
            "run_id": opened.run_id,
            "version": opened.version,
            "rank": rank,
            "parent": opened.parent,
            "layout": opened.layout,
            "nonce": f"{rank:016x}",
            "shard_bytes": len(shard),
            "sizes": (8,) * len(groups),
            "changed": (1,) * len(groups),
            "digests": "00" * 16 * len(groups),
            "full": tuple(range(len(groups))) if opened.parent.version == 0 else (),
            "blocks": "".join(blocks),
        }
        return Receipt(**{**fields, **changes})  # type: ignore[arg-type]

    async def write_receipt(self, opened: VersionAnswer, rank: int, **changes: object) -> str:
        data = self.make_receipt(opened, rank, **changes).to_bytes()
        await self.store.create(receipt_key(self.run, opened.version, rank), data)
        return sha256_hex(data)

    async def report(
        self, opened: VersionAnswer, rank: int, sha256: str = "0" * 64, *, at: CoordinatorClient | None = None
    ) -> VersionAnswer:
        report = ReceiptReport(term=opened.term, sha256=sha256, encode_s=0.5, upload_s=0.25)
        return await (at or self.client).report_receipt(self.run, opened.version, rank, report)

    async def receipt(
        self, opened: VersionAnswer, rank: int, *, at: CoordinatorClient | None = None, **changes: object
    ) -> VersionAnswer:
        return await self.report(opened, rank, await self.write_receipt(opened, rank, **changes), at=at)

    async def publish(self, step: int) -> VersionAnswer:
        """All ranks publish one step; returns the sealed version."""
        opened = await self.open(step)
        for rank in range(self.world_size):
            answer = await self.receipt(opened, rank)
        self.published += 1
        return answer


@dataclass
class Place:
    """One bucket with as many coordinators as a test wants."""

    store: Store
    clock: Clock
    settings: Settings = field(default_factory=lambda: Settings(poll_s=0.02))
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def node(self, store: Store | None = None, settings: Settings | None = None) -> Node:
        """A coordinator that starts empty. Its loop does not run: tests call ``tick``, or ``tended``."""
        ambient = Ambient(clock=self.clock)
        app = create_app(store or self.store, settings=settings or self.settings, ambient=ambient)
        client = CoordinatorClient("http://coordinator", transport=httpx.ASGITransport(app))
        await self.stack.enter_async_context(client)
        return Node(app, client)

    async def tended(self, settings: Settings | None = None) -> Node:
        """A coordinator with real time whose loop runs, as in a server."""
        app = create_app(self.store, settings=settings or self.settings)
        client = CoordinatorClient("http://coordinator", transport=httpx.ASGITransport(app))
        await self.stack.enter_async_context(app.router.lifespan_context(app))
        await self.stack.enter_async_context(client)
        return Node(app, client)

    def job(self, node: Node, launch: str = "launch-a", **more: object) -> Job:
        return Job(self.store, node.client, launch, **more)  # type: ignore[arg-type]


@pytest_asyncio.fixture
async def place() -> AsyncIterator[Place]:
    found = Place(MemoryStore(), Clock())
    async with found.stack:
        yield found


@pytest_asyncio.fixture
async def node(place: Place) -> Node:
    return await place.node()


@pytest_asyncio.fixture
async def job(place: Place, node: Node) -> Job:
    """A job that has its term and its layout."""
    return await place.job(node).start()


Beat = Callable[..., AgentReport]


@pytest.fixture
def beat() -> Beat:
    """``beat(run_id, staged, serving)``: an agent's report."""

    def make(
        run_id: str, staged: Position | None = None, serving: Position | None = None, ttl_s: float = 30
    ) -> AgentReport:
        state = "serving" if serving else "staged" if staged else "starting"
        return AgentReport(run_id=run_id, state=state, staged=staged, serving=serving, ttl_s=ttl_s)

    return make


WEIGHTCAST = str(Path(sys.executable).with_name("weightcast"))


class Server:
    """A ``weightcast coordinator`` process."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._ready = directory / f"ready-{time.monotonic_ns()}"
        self._log = self._ready.with_suffix(".log")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [WEIGHTCAST, "coordinator", "--ready-file", str(self._ready), *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.first_line = ""

    def url(self) -> str:
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline().decode().strip()
        assert re.match("listening on https?://(127.0.0.1|localhost|0.0.0.0):", self.first_line), self.log
        assert self.first_line.endswith(self._ready.read_text().strip())
        return self._ready.read_text().strip()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        status = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(*arguments: str) -> Server:
        started.append(Server(tmp_path, *arguments))
        return started[-1]

    yield start
    for server in started:
        server.end(signal.SIGKILL)


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What ``weightcast coordinator`` says when it does not start."""

    def refuse(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["weightcast", "coordinator", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        assert (ended.value.code, told.out) == (1, "")
        assert told.err.startswith("weightcast: ")
        assert told.err.count("\n") == 1
        return told.err

    return refuse


@pytest.fixture
def listen() -> Iterator[Callable[..., str]]:
    """``listen(app, **config)``: serve an application by uvicorn in a thread of this process; its address."""
    started: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(app: FastAPI, **config: object) -> str:
        settings: dict[str, object] = {"port": 0, "log_level": "error", "lifespan": "on", **config}
        server = uvicorn.Server(uvicorn.Config(app, **settings))  # type: ignore[arg-type]
        thread = threading.Thread(target=server.run)
        thread.start()
        started.append((server, thread))
        while not server.started:
            assert thread.is_alive()
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield start
    for server, thread in started:
        server.force_exit = server.should_exit = True
        thread.join()


__all__ = ["AgentAnswer", "Beat", "Clock", "Job", "Node", "Place"]
