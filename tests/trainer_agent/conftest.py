"""A real coordinator over HTTP on a bucket in a directory, and readers that share no code with rollout_agent."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn

import codec
from coordinator.ambient import Ambient, Settings
from coordinator.app import create_app
from tests.conftest import SHM_PREFIX
from trainer_agent import Publisher, TrainerError
from weight_store.boxes import Box
from weight_store.chain import plan_chain
from weight_store.layout import Layout
from weight_store.manifest import Manifest
from weight_store.opening import open_store
from weight_store.position import Position
from weight_store.reading import fetch_groups, read_head, read_layout, read_manifest, read_receipt
from weight_store.receipt import Receipt, group_ranges
from weight_store.store import Store
from weightcast.devserver import free_port

TORCH = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "I64": torch.int64, "U8": torch.uint8}


@dataclass
class Service:
    """One coordinator on one bucket; can be stopped and started again at the same address."""

    store_url: str
    port: int
    expire_after_s: float = 60.0
    tls: tuple[str, str] | None = None
    signs: int = 0
    """Signs of life that were answered."""
    _ahead_s: float = 0.0
    _server: uvicorn.Server | None = None
    _thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Service:
        store = open_store(self.store_url)
        settings = Settings(expire_after_s=self.expire_after_s, poll_s=0.1)
        app = create_app(store, settings=settings, ambient=Ambient(clock=lambda: time.monotonic() + self._ahead_s))

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, send)
            if scope["type"] == "http" and "/progress/" in scope["path"]:
                self.signs += 1

        config = uvicorn.Config(counted, host="127.0.0.1", port=self.port, log_level="warning", lifespan="on")
        if self.tls is not None:
            config.ssl_certfile, config.ssl_keyfile = self.tls
        config.timeout_graceful_shutdown = 1
        server = self._server = uvicorn.Server(config)

        async def serve() -> None:
            await server.serve()
            await store.close()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)
        return self

    def pass_time(self, seconds: float) -> None:
        """The coordinator's clock goes forward: what takes minutes need not be waited for."""
        self._ahead_s += seconds

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(10)
            self._server = None

    def read(self, run: str, version: int | None = None) -> Rebuilt:
        """The weights of a version (None: the head's), rebuilt from the bucket along the planned chain."""
        return asyncio.run(_rebuild(open_store(self.store_url), run, version))


@dataclass
class Rebuilt:
    manifest: Manifest
    position: Position
    layout: Layout
    receipts: list[Receipt]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors, aliases included."""
        return self.tensors | {alias: self.tensors[name] for alias, name in self.layout.aliases.items()}


async def _rebuild(store: Store, run: str, version: int | None) -> Rebuilt:
    try:
        head, _ = await read_head(store, run)
        position = head.position
        manifest = await read_manifest(store, run, position)
        if version is not None and version != position.version:
            link = next(link for link in manifest.chain if link.version == version)
            position = link.position
            manifest = await read_manifest(store, run, position)
        layout = await read_layout(store, run, manifest.layout)
        groups: dict[str, np.ndarray] = {}
        receipts: list[Receipt] = []
        for hop in plan_chain(None, manifest, position):
            there = await read_manifest(store, run, hop.position)
            there_layout = await read_layout(store, run, there.layout)
            tensors = _Tensors(there_layout, groups)
            refs = hop.extra_full or there.receipts
            receipts = []
            for rank, ref in enumerate(refs):
                receipt = await read_receipt(store, run, hop.position, rank, ref, extra_full=bool(hop.extra_full))
                receipts.append(receipt)
                async for fetched in fetch_groups(store, run, receipt, group_ranges(receipt, there_layout)):
                    tensors.apply(fetched.range, bytes(fetched.payload))
        found = {
            t.name: torch.frombuffer(bytearray(groups[t.name].tobytes()), dtype=TORCH[t.dtype]).reshape(t.shape)
            if t.nbytes
            else torch.empty(t.shape, dtype=TORCH[t.dtype])
            for t in layout.tensors
        }
        return Rebuilt(manifest, position, layout, receipts, found)
    finally:
        await store.close()


class _Tensors:
    """Whole tensors as raw bits; groups are gathered from and scattered into them (layouts may differ by version)."""

    def __init__(self, layout: Layout, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays
        for tensor in layout.tensors:
            elements = tensor.nbytes // tensor.itemsize
            arrays.setdefault(tensor.name, np.zeros(elements, f"u{tensor.itemsize}"))

    def apply(self, item: object, payload: bytes) -> None:
        group = item.group  # type: ignore[attr-defined]
        base = None
        if codec.needs_base(payload):
            parts = [self._view(p.tensor, p.box).reshape(-1) for p in group.pieces]
            base = np.concatenate(parts) if parts else np.zeros(0, f"u{group.itemsize}")
        change = codec.decode_group(base, payload, group.dtype, group.elements)
        assert change.digest == item.digest  # type: ignore[attr-defined]
        result = base if base is not None else np.zeros(group.elements, f"u{group.itemsize}")
        codec.apply_change(result, change)
        for piece in group.pieces:
            part = result[piece.start : piece.start + piece.box.elements]
            self._view(piece.tensor, piece.box)[...] = part.reshape(piece.box.sizes)

    def _view(self, tensor: object, box: Box) -> np.ndarray:
        whole = self.arrays[tensor.name].reshape(tensor.shape)  # type: ignore[attr-defined]
        return whole[(*(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)), ...)]


@pytest.fixture(scope="session")
def start_service() -> Callable[..., Service]:
    """``start_service(store_url)`` starts a coordinator, for fixtures that stop it themselves."""
    return lambda store_url, **settings: Service(store_url, free_port(), **settings).start()


@pytest.fixture
def make_service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """``make_service(expire_after_s=..., store_url=...)`` starts a coordinator; stopped at the end."""
    made: list[Service] = []

    def make(store_url: str | None = None, **settings: Any) -> Service:
        if store_url is None:
            (tmp_path / "bucket").mkdir(exist_ok=True)
            store_url = f"file://{tmp_path / 'bucket'}"
        service = Service(store_url, free_port(), **settings).start()
        made.append(service)
        return service

    yield make
    for service in made:
        service.stop()


@pytest.fixture
def service(make_service: Callable[..., Service]) -> Service:
    """A coordinator on a bucket in a directory."""
    return make_service()


@pytest.fixture(autouse=True)
def shm_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Shared memory of the test's own; every test gives all of it back."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=SHM_PREFIX) as name:
        monkeypatch.setenv("WEIGHTCAST_SHM_DIR", name)
        yield Path(name)
        deadline = time.monotonic() + 10
        while (left := list(Path(name).iterdir())) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left


def published(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a reader must find of a state published with the default casting."""

    def cast(name: str, tensor: torch.Tensor) -> torch.Tensor:
        keep = not tensor.is_floating_point() or name.endswith("e_score_correction_bias")
        return tensor if keep else tensor.to(torch.bfloat16)

    return {name: cast(name, tensor) for name, tensor in state.items()}


@pytest.fixture
def check_same() -> Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None]:
    """``check_same(found, state)``: ``found`` holds ``state``, as published by default, bit for bit."""

    def check(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
        wanted = published(state)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
            one, two = (t.contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor))
            assert torch.equal(one, two), name

    return check


@pytest.fixture
def make_state() -> Callable[..., dict[str, torch.Tensor]]:
    """``make_state(seed)``: a small model of many kinds of tensors."""

    def make(seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "model.embed_tokens.weight": torch.randn(200, 32, generator=generator),
            "model.layers.0.w": torch.randn(64, 48, generator=generator),
            "model.layers.1.w": torch.randn(64, 48, generator=generator).t(),
            "model.layers.1.e_score_correction_bias": torch.randn(7, generator=generator),
            "model.norm.weight": torch.ones(32),
            "model.scalar": torch.tensor(3.5),
            "model.empty": torch.zeros(0, 4),
            "model.steps": torch.tensor([1, 2, 3]),
        }

    return make


@pytest.fixture
def moved() -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """``moved(state)``: a little further along, as a step of an optimiser leaves it."""

    def move(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: t + 1e-4 if t.is_floating_point() else t for n, t in state.items()}

    return move


@dataclass
class Ranks:
    """The Publishers of all ranks of one launch, in one process; calls run in one thread a rank."""

    publishers: list[Publisher]

    def together(self, call: Callable[[Publisher, int], Any]) -> list[Any]:
        """``call(publisher, rank)`` on all ranks at once; an error is its result."""

        def one(rank: int) -> Any:
            try:
                return call(self.publishers[rank], rank)
            except TrainerError as error:
                return error

        with ThreadPoolExecutor(len(self.publishers)) as pool:
            return list(pool.map(one, range(len(self.publishers))))


@pytest.fixture
def launch_ranks() -> Iterator[Callable[..., Ranks]]:
    """``launch_ranks(service, world_size, run="r", **options)``: the Publishers of one launch, closed at the end."""
    made: list[Publisher] = []

    def launch(service: Service, world_size: int, run: str = "r", **options: Any) -> Ranks:
        name = f"launch-{len(made)}"
        options = {"store": service.store_url, "coordinator": service.url, **options}
        publishers = [
            Publisher(run=run, rank=rank, world_size=world_size, launch=name, **options) for rank in range(world_size)
        ]
        made.extend(publishers)
        return Ranks(publishers)

    yield launch
    for publisher in made:
        publisher.close(5)
