"""An engine that was told and has not answered may be loading still: no byte changes before it has, restart or not."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_agent.agent import Agent, Pace
from rollout_agent.disk import LocalDisk
from rollout_agent.engine import NotifyEngine, Staged
from rollout_agent.errors import EngineAbsent, EngineLoading, EngineRefused, EngineSilent
from rollout_agent.places import Places
from rollout_agent.replica import Replica
from rollout_agent.telling import Telling
from tests.rollout_agent.following import followed, until
from tests.rollout_agent.training import RUN_ID, Training, read_model
from weight_store.local import LocalStore
from weight_store.position import Position

ROOT = Path(__file__).parents[2]
QUICK = Pace(poll_s=0.02, first_retry_s=0.02, longest_retry_s=0.05, watch_s=0.02)

LOADER = """
import sys, time
from pathlib import Path
path, out = Path(sys.argv[1]), Path(sys.argv[3])
(file,) = path.glob("*.safetensors")
with file.open("rb", buffering=0) as found:
    half = found.read(file.stat().st_size // 2)
    out.joinpath(f"loading-{sys.argv[2]}").touch()
    while not out.joinpath(f"go-{sys.argv[2]}").exists():
        time.sleep(0.02)
    data = half + found.read()
number = len(list(out.glob(f"loaded-{sys.argv[2]}-*")))
out.joinpath(f"loaded-{sys.argv[2]}-{number}").write_bytes(data)
"""


@dataclass
class HttpEngine:
    """Reads half of the file, and the rest once ``go_on`` is set; one load at a time, as engines do. No gate."""

    model: Path
    loaded: list[tuple[int, dict[str, bytes]]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    loading: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    _one: threading.Lock = field(default_factory=threading.Lock)

    def load(self, version: int) -> None:
        self.asked.append(version)
        with self._one:
            (path,) = self.model.glob("*.safetensors")
            with path.open("rb", buffering=0) as file:
                data = file.read(path.stat().st_size // 2)
                self.loading.set()
                assert self.go_on.wait(60)
                data += file.read()
            self.loaded.append((version, read_model({path.name: data})))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[HttpEngine]:
    found = HttpEngine(tmp_path / "model")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.load(body["version"])
            try:
                self.send_response(200)
                self.end_headers()
            except OSError:
                pass  # whoever asked is gone

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}/"
    found.go_on.set()
    try:
        yield found
    finally:
        found.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Fixed:
    """A run in a directory and agents for it, as processes."""

    root: Path
    training: Training

    def publish(self) -> None:
        asyncio.run(self.training.publish())
        self.training.step(0.01)

    def version(self) -> int:
        try:
            whole = (self.root / "model/.weightcast/whole.json").read_bytes().partition(b"\n")[2]
        except FileNotFoundError:
            return 0
        return int(json.loads(whole)["position"]["version"])

    @contextmanager
    def agent(self, *options: object) -> Iterator[subprocess.Popen[bytes]]:
        where = ["--run", "tiny", "--region", "eu", "--model-dir", self.root / "model", "--poll", 0.05]
        command = [sys.executable, "-m", "weightcast", "rollout", *where, "--store", f"file://{self.root}/bucket"]
        with (self.root / "log").open("ab") as log:
            process = subprocess.Popen([*map(str, command), *map(str, options)], cwd=ROOT, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 40
        while not condition():
            assert time.monotonic() < deadline, (self.root / "log").read_text()[-3000:]
            time.sleep(0.02)

    def stays(self, version: int) -> None:
        """Give what must not happen the time that it would need."""
        for _ in range(50):
            time.sleep(0.02)
            assert self.version() == version


@pytest.fixture
def run(tmp_path: Path) -> Fixed:
    found = Fixed(tmp_path, Training(LocalStore(tmp_path / "bucket")))
    found.publish()
    return found


def check(engine: HttpEngine, training: Training) -> None:
    for version, tensors in engine.loaded:
        assert tensors == training.tensors(version), f"a mixture, loaded as version {version}"


def test_an_engine_outlives_the_agent_that_told_it(run: Fixed, engine: HttpEngine) -> None:
    with run.agent("--notify", engine.url) as agent:
        run.until(lambda: engine.loaded)
        engine.loading.clear()
        engine.go_on.clear()
        run.publish()
        run.until(engine.loading.is_set)
        agent.send_signal(signal.SIGKILL)
        agent.wait()
    run.publish()
    with run.agent("--notify", engine.url):
        run.until(lambda: engine.asked == [1, 2, 2])
        run.stays(2)
        engine.go_on.set()
        run.until(lambda: len(engine.loaded) == 4)
    assert [version for version, _ in engine.loaded] == [1, 2, 2, 3]
    check(engine, run.training)


def test_an_engine_that_takes_too_long_is_told_again_and_waited_for(run: Fixed, engine: HttpEngine) -> None:
    with run.agent("--notify", engine.url, "--engine-timeout", 1):
        run.until(lambda: engine.loaded)
        engine.loading.clear()
        engine.go_on.clear()
        run.publish()
        run.until(lambda: len(engine.asked) > 2)
        run.publish()
        run.stays(2)
        assert "did not answer" in (run.root / "log").read_text()
        engine.go_on.set()
        run.until(lambda: engine.loaded[-1][0] == 3)
    check(engine, run.training)


def test_a_command_outlives_the_agent_that_ran_it(run: Fixed, tmp_path: Path) -> None:
    """It reads the files itself; another agent lets it end before it starts the next."""
    (tmp_path / "loader.py").write_text(LOADER)
    (tmp_path / "go-1").touch()
    command = shlex.join([sys.executable, str(tmp_path / "loader.py"), "{path}", "{version}", str(tmp_path)])

    def loaded() -> list[str]:
        return sorted(path.name for path in tmp_path.glob("loaded-*"))

    with run.agent("--on-version", command) as agent:
        run.until(loaded)
        run.publish()
        run.until((tmp_path / "loading-2").exists)
        agent.send_signal(signal.SIGKILL)
        agent.wait()
    run.publish()
    (tmp_path / "loading-2").unlink()
    (tmp_path / "go-3").touch()
    with run.agent("--on-version", command):
        run.until(lambda: "still runs" in (run.root / "log").read_text())
        run.stays(2)
        assert not (tmp_path / "loading-2").exists(), "no second one beside it"
        (tmp_path / "go-2").touch()
        run.until(lambda: "loaded-3-0" in loaded())
    assert loaded() == ["loaded-1-0", "loaded-2-0", "loaded-2-1", "loaded-3-0"]
    for name in loaded():
        found = read_model({name: (tmp_path / name).read_bytes()})
        assert found == run.training.tensors(int(name.split("-")[1])), f"{name} is a mixture"


class Refuses:
    """An engine that does not load, with some error, until it does."""

    def __init__(self, error: type[EngineRefused] = EngineSilent, says: str = "no answer") -> None:
        self.error, self.says = error, says
        self.told: list[int] = []
        self.confirms = False

    async def load(self, staged: Staged) -> None:
        self.told.append(staged.version)
        if not self.confirms:
            raise self.error(self.says)


async def left_unanswered(training: Training, path: Path) -> None:
    """Version 1 told by an agent that has ended, version 2 published."""
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=path, store=training.store) as replica:
        with pytest.raises(EngineSilent):
            await Agent(replica, "tiny", "eu-west", "a1", engine=Refuses(), pace=QUICK).step()
    training.step()
    await training.publish()


async def test_an_engine_that_is_gone_is_not_waited_for(training: Training, tmp_path: Path) -> None:
    await left_unanswered(training, tmp_path)
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        await Agent(replica, "tiny", "eu-west", "a1", engine=Refuses(EngineAbsent), pace=QUICK).step()
        assert replica.position == training.position


async def test_an_engine_that_refuses_at_once_is_not_waited_for(training: Training, tmp_path: Path) -> None:
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        agent = Agent(replica, "tiny", "eu-west", "a1", engine=Refuses(EngineRefused), pace=QUICK)
        await agent.step()
        training.step()
        await training.publish()
        await agent.step()
        assert replica.position == training.position


@pytest.mark.parametrize(
    ("error", "says", "sentence"),
    [
        (EngineSilent, "no answer", "no answer"),
        # Perhaps because it is loading.
        (EngineRefused, "busy", "version 1 stays until its engine confirms it or ends; told again it said: busy"),
    ],
    ids=["silent", "refuses"],
)
async def test_an_engine_that_was_silent_is_asked_until_it_confirms(
    training: Training, tmp_path: Path, error: type[EngineRefused], says: str, sentence: str
) -> None:
    await left_unanswered(training, tmp_path)
    engine = Refuses(error, says)
    async with (
        await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica,
        followed(Agent(replica, "tiny", "eu-west", "a1", engine=engine, pace=QUICK)) as agent,
    ):
        await until(lambda: len(engine.told) > 3)
        assert (agent.status.state, replica.position) == ("failed", training.positions[1])
        assert sentence in agent.status.error
        engine.confirms = True
        await until(lambda: replica.serving == training.position)
    assert set(engine.told) == {1, 2}


async def test_a_replica_alone_says_what_to_do(training: Training, tmp_path: Path) -> None:
    await left_unanswered(training, tmp_path)
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        with pytest.raises(EngineLoading, match=r"told\(\)"):
            await replica.catch_up()
        replica.told()
        assert await replica.catch_up() == training.position


async def test_an_agent_that_has_no_engine_asks_nobody(training: Training, tmp_path: Path) -> None:
    await left_unanswered(training, tmp_path)
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        await Agent(replica, "tiny", "eu-west", "a1", pace=QUICK).step()
        assert replica.position == training.position


async def test_no_engine_outlives_its_machine(training: Training, tmp_path: Path) -> None:
    await left_unanswered(training, tmp_path)

    class Rebooted(LocalDisk):
        def boot_id(self) -> str:
            return "another"

    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store, disk=Rebooted()) as replica:
        assert replica.telling is None
        assert await replica.catch_up() == training.position


async def test_what_is_no_answer() -> None:
    """Nobody listens: nobody loads. Whoever was reached and says nothing may be loading, also behind a proxy."""

    def engine(answer: Callable[[httpx.Request], httpx.Response]) -> NotifyEngine:
        return NotifyEngine("http://engine/load", transport=httpx.MockTransport(answer))

    def fails(error: type[httpx.TransportError]) -> Callable[[httpx.Request], httpx.Response]:
        def answer(request: httpx.Request) -> httpx.Response:
            raise error("failed", request=request)

        return answer

    staged = Staged("tiny", 1, 1, Path("/model"))
    for status in (502, 504):
        with pytest.raises(EngineSilent, match=str(status)):
            await engine(lambda _, status=status: httpx.Response(status)).load(staged)  # type: ignore[misc]
    for error in (httpx.ReadTimeout, httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectTimeout):
        with pytest.raises(EngineSilent, match="did not answer"):
            await engine(fails(error)).load(staged)
    for refusal, says in ((lambda _: httpx.Response(500), EngineRefused), (fails(httpx.ConnectError), EngineAbsent)):
        with pytest.raises(EngineRefused) as caught:
            await engine(refusal).load(staged)
        assert type(caught.value) is says


def test_the_lock_of_a_command_is_one_that_the_next_agent_finds(tmp_path: Path) -> None:
    disk, places = LocalDisk(), Places.of(tmp_path)
    disk.make_dir(places.private)
    telling = Telling(disk, places)
    position = Position(version=1, sha256="0" * 64)
    telling.begin(RUN_ID, position)
    places.gate_told.unlink()
    telling.begin(RUN_ID, position)
    assert disk.try_lock(places.gate_told, shared=False) is None
    telling.end()
    assert disk.try_lock(places.gate_told, shared=False) is not None


def test_the_lock_of_a_command_is_nobody_elses(tmp_path: Path) -> None:
    """Released, it is free although a process that inherited it still runs: an engine that a command started."""
    places = Places.of(tmp_path)
    lock = LocalDisk().try_lock(tmp_path / "lock", shared=False)
    assert lock is not None
    descriptor = lock.descriptor
    assert descriptor is not None
    process = subprocess.Popen(["sleep", "60"], pass_fds=(descriptor,))
    try:
        assert LocalDisk().try_lock(tmp_path / "lock", shared=False) is None
        lock.release()
        again = LocalDisk().try_lock(tmp_path / "lock", shared=False)
        assert again is not None
        again.release()
        assert os.fspath(places.model) == os.fspath(tmp_path)
    finally:
        process.kill()
        process.wait()
