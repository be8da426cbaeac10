"""A local server ends with the process that started it, and leaves no file behind."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from weightcast.devserver import DevServerError, SeaweedServer, ServerProcess, free_ports

_ORPHAN = """
import sys, tempfile
from weightcast.devserver import SeaweedServer
server = SeaweedServer().start()
server.create_bucket("bucket")
print(server.pid, server.endpoint_url, flush=True)
sys.stdin.read()
"""


def _eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return False


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_nothing_is_left_after_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sockets = set(glob.glob("/tmp/seaweedfs-*"))
    with SeaweedServer() as server:
        server.create_bucket("bucket")
        server.create_bucket("bucket")
        pid = server.pid
    assert not _lives(pid)
    assert list(tmp_path.iterdir()) == []
    assert set(glob.glob("/tmp/seaweedfs-*")) <= sockets


def test_killing_the_parent_ends_the_server_and_removes_its_files(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", _ORPHAN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline().split()[0])
        assert _lives(pid)
        parent.send_signal(signal.SIGKILL)
    assert _eventually(lambda: not _lives(pid))
    assert _eventually(lambda: list(tmp_path.iterdir()) == [])


def test_a_kept_directory_still_holds_the_objects(tmp_path: Path) -> None:
    with SeaweedServer(tmp_path / "data") as server:
        server.create_bucket("bucket")
        client = server._client()
        client.put_object(Bucket="bucket", Key="a/b", Body=b"kept")
        client.close()
    with SeaweedServer(tmp_path / "data") as server:
        client = server._client()
        assert patiently(lambda: read(client)) == b"kept"
        client.close()


def read(client: Any) -> bytes:
    body = client.get_object(Bucket="bucket", Key="a/b")["Body"]
    data: bytes = body.read()
    body.close()
    return data


def patiently(call: Callable[[], bytes]) -> bytes:
    """A server that was just started again answers 500 until it has found its volumes."""
    for _ in range(60):
        try:
            return call()
        except ClientError as error:
            if error.response["Error"]["Code"] != "InternalError":
                raise
            time.sleep(0.5)
    return call()


def test_a_server_that_dies_while_starting_shows_its_log(tmp_path: Path) -> None:
    process = ServerProcess(
        ["/bin/sh", "-c", "echo no such luck; exit 3"], cwd=tmp_path, log_path=tmp_path / "log", env={}
    )
    with pytest.raises(DevServerError, match="no such luck"):
        process.wait_until(lambda: False)
    process.stop()
    process.stop()


def test_ports_differ() -> None:
    assert len(set(free_ports(8))) == 8


def test_a_server_that_is_not_running_has_no_address() -> None:
    with pytest.raises(DevServerError, match="not running"):
        _ = SeaweedServer().endpoint_url
