"""A stand-in for inference engines: one HTTP address a region that loads the model directory when told to.

It loads through the gate with the safetensors library, hashes what it loaded with hashlib and compares that with what
the trainer's ranks said they exported at that step: a check of every version served, which shares no code with ours.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rollout_agent.errors import RolloutError
from rollout_agent.gate import shared
from weightcast.demo.boxes import load_places
from weightcast.demo.errors import DemoError
from weightcast.demo.loaded import LoadedModel

_MAX_BODY_BYTES = 64 << 10
_GATE_TIMEOUT_S = 30.0
_CLAIM_TIMEOUT_S = 10.0


class Claims:
    """What ranks said they exported: step and rank to SHA-256. A step that is taken again may have several."""

    def __init__(self, work: Path, world_size: int) -> None:
        self._work = work
        self._world_size = world_size
        self._lock = threading.Condition()
        self._known: dict[tuple[int, int], set[str]] = defaultdict(set)
        self._compared: dict[str, set[int]] = defaultdict(set)

    def add(self, step: int, rank: int, sha256: str) -> None:
        """Take down a rank's claim."""
        with self._lock:
            self._known[step, rank].add(sha256)
            self._lock.notify_all()

    def compared(self, region: str) -> int:
        """How many versions of a region have been compared, and were equal."""
        with self._lock:
            return len(self._compared[region])

    def compare(self, region: str, version: int, step: int, model_dir: Path) -> None:
        """Load the directory and compare it, rank by rank. ``DemoError`` naming region and rank if it differs."""
        with LoadedModel(model_dir) as model:
            for rank in range(self._world_size):
                found = hashlib.sha256()
                for place in load_places(self._work / f"places-{rank}.json"):
                    found.update(model.rows(place))
                if found.hexdigest() not in self._claims_of(step, rank):
                    raise DemoError(f"{region} serves other bytes for version {version} than rank {rank} exported")
        with self._lock:
            self._compared[region].add(version)

    def _claims_of(self, step: int, rank: int) -> set[str]:
        """A rank says so before it publishes, but what it wrote may not have been read yet."""
        with self._lock:
            self._lock.wait_for(lambda: self._known[step, rank], _CLAIM_TIMEOUT_S)
            return set(self._known[step, rank])


class Engines:
    """The engines of all regions behind one loopback server, as a context manager."""

    def __init__(self, regions: Sequence[str], claims: Claims) -> None:
        self._claims = claims
        self._failures: list[str] = []
        engines = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = min(int(self.headers.get("Content-Length", 0)), _MAX_BODY_BYTES)
                status = engines._load(self.path.strip("/"), json.loads(self.rfile.read(size)))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="engines", daemon=True)
        self.addresses = {region: f"http://127.0.0.1:{self._server.server_port}/{region}" for region in regions}

    def __enter__(self) -> Engines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def check(self) -> None:
        """``DemoError`` if an engine ever loaded a wrong weight."""
        if self._failures:
            raise DemoError(self._failures[0])

    def _load(self, region: str, told: dict[str, object]) -> int:
        """Load what the agent announced; the HTTP status with which the engine answers."""
        path, version, step = Path(str(told["path"])), int(str(told["version"])), int(str(told["step"]))
        try:
            with shared(path, timeout_s=_GATE_TIMEOUT_S):
                self._claims.compare(region, version, step, path)
        except (DemoError, RolloutError, OSError) as error:
            self._failures.append(str(error))
            return 500
        return 200
