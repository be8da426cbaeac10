"""Engines hear of each version, and only what they confirm counts as serving."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import httpx
import pytest

from rollout_agent.engine import CommandEngine, Engines, NotifyEngine, Staged
from rollout_agent.errors import EngineRefused

STAGED = Staged("tiny", 7, 42, Path("/models/tiny dir"))


async def test_a_command_gets_version_path_step_and_run(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code = f"import sys, json; json.dump(sys.argv[1:], open({str(out)!r}, 'w'))"
    await CommandEngine(f'{sys.executable} -c "{code}" {{version}} {{path}} x{{step}}-{{run}}').load(STAGED)
    assert json.loads(await asyncio.to_thread(out.read_text)) == ["7", "/models/tiny dir", "x42-tiny"]


async def test_no_shell_runs_the_command() -> None:
    await CommandEngine("test 'a;$(b)' = a';$(b)'").load(STAGED)


@pytest.mark.parametrize(
    ("command", "operator"),
    [
        ("echo no; exit 3", ";"),
        ("test -e x && reload", "&&"),
        ("reload||true", "||"),
        ("reload {path} | logger", "|"),
        ("reload 2>/dev/null", ">"),
        ("reload < {path}/config.json", "<"),
        ("reload $(cat port)", "$("),
        ('reload "$(cat port)"', "$("),
        ("reload `cat port`", "`"),
        ("reload {version} &", "&"),
    ],
)
def test_what_only_a_shell_understands_is_refused_at_once(command: str, operator: str) -> None:
    with pytest.raises(EngineRefused, match=re.escape(f"has {operator} in it, which only a shell understands")) as told:
        CommandEngine(command)
    assert "sh -c '…'" in str(told.value)


@pytest.mark.parametrize(
    "command",
    [
        "sh -c 'echo no; exit 3'",
        'timeout 9 /bin/bash -c "reload $(cat port) && true"',
        "curl -fsS -X POST http://127.0.0.1:8000/reload?path={path}&step={step}",
        """curl -d '{"a": ";|>"}' http://127.0.0.1/""",
        "python -c \"import sys; print('it is > 3')\"",
        r"find {path} -exec touch {} \;",
        "echo it\\'s $5",
        "sh -c 'echo ${version} {{port}} {} {1..3} { print }'",
    ],
)
def test_plain_arguments_are_left_alone(command: str) -> None:
    CommandEngine(command)


@pytest.mark.parametrize("command", ["reload {verson}", "sh -c 'reload {verson}'", "reload --to={path}{verson}"])
def test_what_would_not_be_filled_in_is_refused_at_once(command: str) -> None:
    with pytest.raises(EngineRefused, match=r"has \{verson\} in it, and only \{version\}, \{path\}, \{step\}, \{run\}"):
        CommandEngine(command)


async def test_a_failing_command_says_why() -> None:
    with pytest.raises(EngineRefused, match="status 3 for version 7: out of memory"):
        await CommandEngine("sh -c 'echo out of memory; exit 3'").load(STAGED)


async def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    engine = CommandEngine(f"sh -c 'sleep 60 & echo $! > {marker}; wait'", timeout_s=0.5)
    with pytest.raises(EngineRefused, match=r"within 0\.5 s"):
        await engine.load(STAGED)
    pid = int(await asyncio.to_thread(marker.read_text))
    for _ in range(100):
        if not await asyncio.to_thread(_runs, pid):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"process {pid} is still there")


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("command", ["/does/not/exist {version}", "", "'open"])
async def test_a_command_that_cannot_run(command: str) -> None:
    with pytest.raises(EngineRefused):
        await CommandEngine(command).load(STAGED)


async def test_notify_posts_json_and_takes_2xx_for_yes() -> None:
    seen: list[object] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        return httpx.Response(204 if len(seen) == 1 else 503)

    engine = NotifyEngine("http://user:secret@engine/load?token=t", transport=httpx.MockTransport(answer))
    await engine.load(STAGED)
    assert seen == [{"run": "tiny", "version": 7, "path": "/models/tiny dir", "step": 42}]
    with pytest.raises(EngineRefused, match="http://engine/load answered 503") as caught:
        await Engines([engine]).load(STAGED)
    assert "secret" not in str(caught.value)
    assert "token" not in str(caught.value)


async def test_nobody_listens() -> None:
    with pytest.raises(EngineRefused, match="does not answer"):
        await NotifyEngine("http://127.0.0.1:9/").load(STAGED)


async def test_the_agents_token_stays_with_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTCAST_TOKEN", "wct_secret")
    await CommandEngine('sh -c \'test -z "$WEIGHTCAST_TOKEN" && test -n "$PATH"\'').load(STAGED)
