"""Relays between each process and what it talks to; each has weather of its own."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence

from tests.relay import Cut, Hook, Relay

Address = tuple[str, int]
WEATHERS = ("cut", "slow", "wrong", "torn", "hole", "rotten")
"""No connections; late; a bit of a chunk in ten is flipped; connections end in the middle; nothing gets through; a bit
of four large chunks in ten is flipped, which most often are payload."""
_LARGE_BYTES = 1200


class Link(Relay):
    """Leads each connection to one of ``upstreams``."""

    def __init__(self, name: str, upstreams: Sequence[Address], chance: random.Random) -> None:
        super().__init__("http://127.0.0.1:1")
        self.name = name
        self._upstreams = tuple(upstreams)
        self._chance = chance
        self._weather = "fair"
        self._clients: set[asyncio.StreamWriter] = set()

    def hooks(self) -> tuple[Hook, Hook]:
        return self._through, self._through

    def change(self, weather: str) -> None:
        """One of ``WEATHERS``, or fair."""
        self._weather = weather
        if weather == "cut":
            for client in self._clients:
                client.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.upstream = self._chance.choice(self._upstreams)
        self._clients.add(writer)
        try:
            if self._weather != "cut":
                with contextlib.suppress(OSError):
                    await super()._pass(reader, writer)
        finally:
            self._clients.discard(writer)
            writer.close()

    async def _through(self, data: bytes) -> bytes:
        while self._weather == "hole":  # noqa: ASYNC110 - any weather may come next
            await asyncio.sleep(0.1)
        if self._weather == "slow":
            await asyncio.sleep(self._chance.random() * 0.3)
        elif self._weather == "cut":
            raise Cut
        elif self._weather == "torn" and self._chance.random() < 0.15:
            raise Cut(data[: self._chance.randrange(len(data) + 1)])
        elif self._chance.random() < self._share_flipped(len(data)):
            at = self._chance.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << self._chance.randrange(8)]) + data[at + 1 :]
        return data

    def _share_flipped(self, size: int) -> float:
        if self._weather == "wrong":
            return 0.1
        return 0.4 if self._weather == "rotten" and size >= _LARGE_BYTES else 0.0
