"""An agent behind a link that cuts, delays and corrupts what a real S3 server sends ends up bit-exact all the same."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from rollout_agent.agent import Agent, Pace
from rollout_agent.gate import shared
from rollout_agent.replica import Replica
from tests.rollout_agent.training import Training
from weight_store.opening import open_store
from weight_store.retry import RetryPolicy
from weight_store.s3_settings import S3Options
from weightcast.devserver import SeaweedServer

ReadDir = Callable[[Path], dict[str, bytes]]
QUICK = Pace(poll_s=0.02, first_retry_s=0.02, longest_retry_s=0.1, watch_s=0.05)
IMPATIENT = RetryPolicy(attempts=3, first_delay_s=0.01, max_delay_s=0.05, budget_s=5.0)
PROMPT = S3Options(read_timeout_s=1.0)
"""A length with a wrong bit makes the client wait for bytes that never come."""
SPECS = tuple((f"model.layers.{n}.w", "BF16", (128, 256), "rows" if n % 2 else "cols") for n in range(8))
VERSIONS = 8


@dataclass
class BadLink:
    """Passes bytes on; now and then an answer ends early, comes late, or has a wrong bit."""

    upstream: tuple[str, int]
    chance: random.Random = field(default_factory=lambda: random.Random(20))
    harm: float = 0.0
    """Share of the pieces of answers to which something happens."""
    done: Counter[str] = field(default_factory=Counter)
    passing: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(*self.upstream)

        async def upwards() -> None:
            while data := await reader.read(65536):
                up_writer.write(data)
                await up_writer.drain()

        sending = asyncio.create_task(upwards())
        self.passing[sending] = up_writer
        try:
            while data := await up_reader.read(65536):
                writer.write(await self._harmed(data))
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sending
            for side in (writer, up_writer):
                side.close()
                with contextlib.suppress(OSError):
                    await side.wait_closed()
            del self.passing[sending]

    async def end(self) -> None:
        while self.passing:
            for writer in self.passing.values():
                writer.close()
            await asyncio.sleep(0.01)

    async def _harmed(self, data: bytes) -> bytes:
        if self.chance.random() >= self.harm:
            return data
        kind = self.chance.choice(["cut", "late", "wrong", "wrong"])
        self.done[kind] += 1
        if kind == "cut":
            raise ConnectionResetError
        if kind == "late":
            await asyncio.sleep(self.chance.uniform(0.0, 0.2))
            return data
        at = self.chance.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << self.chance.randrange(8)]) + data[at + 1 :]


@asynccontextmanager
async def bad_link(seaweed: SeaweedServer) -> AsyncIterator[tuple[BadLink, int]]:
    address = urlsplit(seaweed.endpoint_url)
    link = BadLink((str(address.hostname), int(address.port or 0)))
    server = await asyncio.start_server(link.handle, "127.0.0.1", 0)
    try:
        yield link, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await link.end()


async def test_what_arrives_is_bit_exact(
    seaweed: SeaweedServer, s3_url: Callable[..., str], tmp_path: Path, read_dir: ReadDir
) -> None:
    url = s3_url("rollout", "bad-link")
    training = Training(open_store(url), specs=SPECS, aliases={})
    async with bad_link(seaweed) as (link, port):
        store = open_store(
            url.replace(seaweed.endpoint_url, f"http://127.0.0.1:{port}"), policy=IMPATIENT, options=PROMPT
        )
        replica = await Replica.open(run="tiny", model_dir=tmp_path, store=store, file_bytes=200_000)
        agent = Agent(replica, "tiny", "eu-west", "a1", pace=QUICK)
        following = asyncio.create_task(agent.follow())
        try:
            for version in range(1, VERSIONS + 1):
                link.harm = 0.2
                await training.publish()
                async with asyncio.timeout(60):
                    while agent.status.staged != training.position:
                        assert not following.done(), following.exception()
                        await asyncio.sleep(0.01)
                with shared(tmp_path, timeout_s=20) as whole:
                    assert whole.position == training.position
                    assert read_dir(tmp_path) == training.tensors(version)
                training.step(0.3)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await replica.close()
            await store.close()
            await training.store.close()
    assert set(link.done) == {"cut", "late", "wrong"}
    assert replica.damage == ()
