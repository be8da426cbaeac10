"""An engine's stand-in: ``python -m tests.soak.engine ENGINE.json [VERSION STEP]``.

Loads through the gate again and again, and when it is told of a version over HTTP; with a version, as the command of
``--on-version``, that one alone. What it found goes to a file.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import logging
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rollout_agent.errors import NotWhole
from rollout_agent.gate import shared
from tests.soak.weights import BLOCKS, STAMP, Log, digest, load

_LOG = logging.getLogger(__name__)


class SoakEngine:
    """``straight``: what it is told of it reads without the gate, as it may."""

    def __init__(self, about: dict[str, object]) -> None:
        self.model, self.region = Path(str(about["model"])), str(about["region"])
        self.straight, self.hurried = bool(about["straight"]), bool(about["hurried"])
        self.log = Log(Path(str(about["log"])))
        self.chance = random.Random()

    def told(self, version: int) -> bool:
        """Load it; whether it is served. Now and then it refuses, or takes long."""
        what = self.chance.random()
        if what < 0.05:
            return False
        if what < 0.1 and not self.hurried:
            time.sleep(self.chance.random() * 12)
        if not self.straight:
            return self.through_gate("told", 20) == version
        with self._trouble("straight"):
            self._read("straight", version)
            return True
        return False

    def through_gate(self, via: str, timeout_s: float) -> int | None:
        """Which version it loaded, if it got in."""
        waits = shared(self.model, timeout_s=timeout_s, verify=self.chance.random() < 0.3)
        with self._trouble(via), contextlib.suppress(NotWhole), waits as whole:
            self._read(via, whole.position.version)
            return whole.position.version
        return None

    @contextlib.contextmanager
    def _trouble(self, via: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.log.add(kind="trouble", region=self.region, via=via, said=repr(error))
            _LOG.exception("not loaded")

    def _read(self, via: str, version: int) -> None:
        """Some engines take their time, and some look at the files twice."""
        pause_s = 0.0 if self.hurried else self.chance.choice([0.0, 0.02, 0.1])
        for _ in range(self.chance.choice([1, 1, 2])):
            self._read_once(via, version, pause_s)

    def _read_once(self, via: str, version: int, pause_s: float) -> None:
        start = time.monotonic()
        bits = load(self.model, lambda: time.sleep(self.chance.random() * pause_s))
        self.log.add(
            kind="load",
            region=self.region,
            via=via,
            version=version,
            start=start,
            end=time.monotonic(),
            stamps=sorted({(int(row[0]), int(row[1])) for row in bits[STAMP]}),
            blocks={block: digest(bits, block) for block in range(BLOCKS)},
        )


def _serve(engine: SoakEngine, port: int) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served = engine.told(told["version"])
            with contextlib.suppress(OSError):  # the agent may be gone
                self.send_response(200 if served else 500)
                self.send_header("Content-Length", "0")
                self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main() -> int:
    about = json.loads(Path(sys.argv[1]).read_text())
    logging.basicConfig(level=logging.INFO)
    engine = SoakEngine(about)
    if len(sys.argv) > 2:
        return 0 if engine.told(int(sys.argv[2])) else 1
    _serve(engine, about["port"])
    while True:
        time.sleep(engine.chance.random() * 3)
        engine.through_gate("gate", 5)


if __name__ == "__main__":
    sys.exit(main())
