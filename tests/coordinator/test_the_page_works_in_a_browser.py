"""The page at / in a real browser, where there is one: it asks for a token, says what is wrong, and follows a run."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator import tokens
from coordinator.access import Scope
from coordinator.app import create_app
from coordinator.client import CoordinatorClient, Credentials
from coordinator.tokens import TokenFile

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

# Opens the page as a person would, types two tokens, and tells what is to be seen until it is told to stop.
DRIVER = """<script>
const page = window.open("/");
const pause = () => new Promise((resolve) => setTimeout(resolve, 200));
const part = (id) => page.document.getElementById(id);
const enter = async (token) => {
  while (!part("access") || part("access").hidden) await pause();
  await fetch("/saw", { method: "POST", body: part("why").textContent });
  part("token").value = token;
  part("access").requestSubmit();
};
(async () => {
  await enter("wct_nobody");
  await enter("TOKEN");
  for (;;) {
    await pause();
    await fetch("/saw", { method: "POST", body: page.document.body.innerText });
  }
})();
</script>"""


class Driven:
    """The application, and beside it the driver's page and what it reports."""

    def __init__(self, app: Any, token: str) -> None:
        self._app = app
        self._driver = DRIVER.replace("TOKEN", token).encode()
        self._seen: list[str] = []
        self._lock = threading.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path")
        if path not in ("/driver", "/saw"):
            await self._app(scope, receive, send)
            return
        body = (await receive())["body"].decode()
        with self._lock:
            self._seen += [body] if path == "/saw" else []
        headers = [(b"content-type", b"text/html")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._driver})

    async def saw(self, *wanted: str) -> None:
        """Return once the newest report has all of ``wanted``, or any earlier one had."""
        while True:
            with self._lock:
                seen = list(self._seen)
            if any(all(text in report for text in wanted) for report in seen):
                return
            await asyncio.sleep(0.1)


@pytest.fixture
async def browse(tmp_path: Path) -> AsyncIterator[Callable[[str], Any]]:
    started: list[asyncio.subprocess.Process] = []

    async def start(url: str) -> None:
        assert CHROMIUM is not None
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-popup-blocking", "--remote-debugging-port=0"]
        quiet = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL}
        arguments = [*flags, f"--user-data-dir={tmp_path}/browser", url]
        started.append(await asyncio.create_subprocess_exec(CHROMIUM, *arguments, **quiet))

    yield start
    for process in started:
        process.terminate()
        await process.wait()


async def test_a_person_enters_a_token_and_sees_versions_come(
    place: Any, listen: Callable[..., str], browse: Callable[[str], Any], beat: Any, tmp_path: Path
) -> None:
    file = tmp_path / "tokens.jsonl"
    admin, viewer = tokens.issue([Scope.ADMIN]), tokens.issue([Scope.VIEWER])
    for issued in (admin, viewer):
        tokens.add(file, issued.stored)
    driven = Driven(create_app(place.store, tokens=TokenFile(file)), viewer.token)
    url = listen(driven)
    async with CoordinatorClient(url, credentials=Credentials(token=admin.token)) as client:
        job = await place.job(type("Node", (), {"client": client})).start()
        first = await job.publish(step=5)
        await client.heartbeat("demo", "eu-west", "a", beat(job.term.run_id, first.position, first.position, ttl_s=600))
        await browse(f"{url}/driver")
        async with asyncio.timeout(120):
            await driven.saw("takes a token with the scope viewer")
            await driven.saw("the request has none that is known here")
            await driven.saw("live", "Version 1 (step 5)", "eu-west\t1\t1\t1")
            await job.publish(step=6)
            await driven.saw("Version 2 (step 6)", "eu-west\t1\t0\t0\t1 version")
