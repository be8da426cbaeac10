"""An agent behind a link that cuts, delays and corrupts what a real S3 server sends ends up bit-exact all the same."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rollout_agent.agent import Agent, Pace
from rollout_agent.gate import shared
from rollout_agent.replica import Replica
from tests.relay import Cut, Hook, Relay
from tests.rollout_agent.following import followed, until
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


class BadLink(Relay):
    """Now and then an answer ends early, comes late, or has a wrong bit."""

    def __init__(self, endpoint_url: str) -> None:
        super().__init__(endpoint_url)
        self.chance = random.Random(20)
        self.harm = 0.0
        """Share of the pieces of answers to which something happens."""
        self.done: Counter[str] = Counter()

    def hooks(self) -> tuple[Hook, Hook]:
        return self._unharmed, self._harmed

    async def _unharmed(self, data: bytes) -> bytes:
        return data

    async def _harmed(self, data: bytes) -> bytes:
        if self.chance.random() >= self.harm:
            return data
        kind = self.chance.choice(["cut", "late", "wrong", "wrong"])
        self.done[kind] += 1
        if kind == "cut":
            raise Cut
        if kind == "late":
            await asyncio.sleep(self.chance.uniform(0.0, 0.2))
            return data
        at = self.chance.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << self.chance.randrange(8)]) + data[at + 1 :]


async def test_what_arrives_is_bit_exact(
    seaweed: SeaweedServer, s3_url: Callable[..., str], tmp_path: Path, read_dir: ReadDir
) -> None:
    url = s3_url("rollout", "bad-link")
    training = Training(open_store(url), specs=SPECS, aliases={})
    link = BadLink(seaweed.endpoint_url)
    async with link.listening():
        store = open_store(
            url.replace(seaweed.endpoint_url, f"http://127.0.0.1:{link.port}"), policy=IMPATIENT, options=PROMPT
        )
        replica = await Replica.open(run="tiny", model_dir=tmp_path, store=store, file_bytes=200_000)
        agent = Agent(replica, "tiny", "eu-west", "a1", pace=QUICK)
        try:
            async with followed(agent):
                for version in range(1, VERSIONS + 1):
                    link.harm = 0.2
                    await training.publish()
                    await until(lambda: agent.status.staged == training.position)
                    with shared(tmp_path, timeout_s=20) as whole:
                        assert whole.position == training.position
                        assert read_dir(tmp_path) == training.tensors(version)
                    training.step(0.3)
        finally:
            await replica.close()
            await store.close()
            await training.store.close()
    assert set(link.done) == {"cut", "late", "wrong"}
    assert replica.damage == ()
