"""The web page and ``weightcast status``: what people see, without anything from elsewhere."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from coordinator.app import create_app
from coordinator.client import CoordinatorClient
from weightcast.commands.status import command


@pytest.fixture
def served(place: Any, listen: Callable[..., str]) -> str:
    """The address of a coordinator on the place's store."""
    return listen(create_app(place.store))


async def status(*arguments: str, **environment: str) -> Any:
    runner = CliRunner(env={"COLUMNS": "200", **environment})
    result = await asyncio.to_thread(runner.invoke, command, arguments)
    assert result.exit_code == 0, result.output
    return result.output


async def test_status_shows_runs_versions_and_agents(job: Any, beat: Any, served: str) -> None:
    sealed = await job.publish(step=5)
    await job.open(step=6)
    async with CoordinatorClient(served) as client:
        await client.heartbeat("demo", "eu-west", "a", beat(job.term.run_id, sealed.position))

    runs = await status("--coordinator", served)
    assert re.search(r"demo\W+1\W+2\W+1\W+launch-a\W+1\W+1", runs)
    run = await status("--coordinator", served, "--run", "demo")
    for wanted in ("sealed", "undecided", "0 of 2 ranks", "eu-west 1, 0 of 1", "staged"):
        assert wanted in run
    found = json.loads(await status("--coordinator", served, "--run", "demo", "--json"))
    assert [version["version"] for version in found["versions"]] == [2, 1]
    assert json.loads(await status("--coordinator", served, "--json"))[0]["run"] == "demo"


async def test_the_variables_of_the_environment_stand_for_run_and_coordinator(job: Any, served: str) -> None:
    variables = {"WEIGHTCAST_COORDINATOR": served, "WEIGHTCAST_RUN": "demo"}
    assert json.loads(await status("--json", **variables))["run"]["run"] == "demo"
    assert json.loads(await status("--json", "--run", "", **variables))[0]["run"] == "demo"


async def test_the_page_needs_nothing_from_elsewhere(node: Any) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(node.app), base_url="http://coordinator") as http:
        page = await http.get("/")
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
        assert not re.search(r"https?://|<script>|<style>|style=|onclick", page.text)
        for path in re.findall(r'(?:src|href)="(page\.\w+)"', page.text):
            file = await http.get(f"/{path}")
            assert file.status_code == 200
            assert not re.search(r"https?://|innerHTML|eval\(", file.text)
