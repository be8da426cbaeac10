"""Real S3 servers, started when the first test asks for one and ended with the test session."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import boto3
import pytest

from weightcast.devserver import SeaweedServer, ServerProcess, free_port

ACCESS_KEY = "test"
SECRET_KEY = "test-secret-key"
READ_ONLY = ("reader", "reader-secret-key")


SHM_PREFIX = f"weightcast-test-{os.getpid()}-"
"""Of directories that tests make in /dev/shm, so that what a killed test run left can be told and removed."""


@pytest.fixture(scope="session", autouse=True)
def no_stale_memory() -> None:
    """Remove what test runs that were killed left in memory."""
    for path in Path("/dev/shm").glob("weightcast-test-*-*"):
        pid = path.name.split("-")[2]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def small_tmpfs() -> Iterator[Callable[[str], Path]]:
    """Mounts a filesystem in memory of a size like "12m", where that is permitted. Its path is short, for sockets."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        directory = Path(tempfile.mkdtemp(prefix="tmpfs-"))
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory], capture_output=True)
        if done.returncode:
            directory.rmdir()
            pytest.skip("mounting a tmpfs is not permitted here")
        mounted.append(directory)
        return directory

    yield mount
    for directory in mounted:
        subprocess.run(["umount", "--lazy", directory], check=True)
        directory.rmdir()


@dataclass(frozen=True)
class S3Endpoint:
    """A running S3 server, as far as tests need to know it."""

    name: str
    endpoint_url: str

    def create_bucket(self, bucket: str) -> None:
        client = boto3.client("s3", endpoint_url=self.endpoint_url, region_name="us-east-1")
        try:
            if bucket not in {found["Name"] for found in client.list_buckets()["Buckets"]}:
                client.create_bucket(Bucket=bucket)
        finally:
            client.close()

    def url(self, bucket: str, prefix: str = "") -> str:
        """Return the store URL of ``bucket``, made if need be."""
        self.create_bucket(bucket)
        return f"s3://{bucket}/{prefix}?endpoint={quote(self.endpoint_url, safe=':/')}&region=us-east-1"


@pytest.fixture(scope="session")
def aws_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Credentials of the test servers in the environment, and nothing of the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        nowhere = tmp_path_factory.mktemp("aws")
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_CONFIG_FILE", str(nowhere / "config"))
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(nowhere / "credentials"))
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


@pytest.fixture(scope="session")
def seaweed(aws_environment: None) -> Iterator[SeaweedServer]:
    """SeaweedFS; the pair ``READ_ONLY`` may read but not write."""
    with SeaweedServer(access_key=ACCESS_KEY, secret_key=SECRET_KEY, read_only=READ_ONLY) as server:
        yield server


@pytest.fixture(scope="session")
def ministack(aws_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Endpoint]:
    """MiniStack, in memory: a second opinion on S3 semantics."""
    directory = tmp_path_factory.mktemp("ministack")
    port = free_port()
    process = _start_ministack(directory, port)
    try:
        yield S3Endpoint("ministack", f"http://127.0.0.1:{port}")
    finally:
        process.stop()


@pytest.fixture(scope="session")
def rclone(aws_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Endpoint]:
    """``rclone serve s3`` of a directory: a server in use that ignores the conditions of conditional writes."""
    directory = tmp_path_factory.mktemp("rclone")
    port = free_port()
    process = ServerProcess(
        [
            str(Path(sys.executable).with_name("rclone")),
            *("serve", "s3", str(directory), "--addr", f"127.0.0.1:{port}"),
            *("--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--config", ""),
        ],
        cwd=directory,
        log_path=directory / "rclone.log",
        env={"PATH": os.environ["PATH"], "HOME": str(directory)},
        remove_after=[directory],
    )
    try:
        process.wait_until(lambda: _answers(f"http://127.0.0.1:{port}/"))
        yield S3Endpoint("rclone", f"http://127.0.0.1:{port}")
    finally:
        process.stop()


@pytest.fixture(scope="session")
def s3_url(seaweed: SeaweedServer) -> Callable[..., str]:
    """``s3_url(bucket, prefix="")``: the store URL of a bucket on SeaweedFS, made if need be."""
    return S3Endpoint("seaweed", seaweed.endpoint_url).url


@pytest.fixture(scope="session")
def read_only_keys(seaweed: SeaweedServer) -> tuple[str, str]:
    """Access and secret key that may read on SeaweedFS but not write."""
    return READ_ONLY


def _start_ministack(directory: Path, port: int) -> ServerProcess:
    process = ServerProcess(
        [sys.executable, "-W", "ignore", "-m", "ministack"],
        cwd=directory,
        log_path=directory / "ministack.log",
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(directory),
            "TMPDIR": str(directory),
            "BIND_HOST": "127.0.0.1",
            "GATEWAY_PORT": str(port),
            "SERVICES": "s3",
            "LOG_LEVEL": "WARNING",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        },
        remove_after=[directory],
    )

    try:
        process.wait_until(lambda: _answers(f"http://127.0.0.1:{port}/_ministack/health"))
    except BaseException:
        process.stop()
        raise
    return process


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
