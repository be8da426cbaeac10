"""docker-compose.yml is right: its shape keeps regions apart, and every command line in it runs on the real CLI.

No Docker engine is needed: SeaweedFS stands in for MinIO, each service is a process with the environment that the file
gives it, and addresses and mount points are replaced by local ones. Nothing else of a command line is changed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open

from rollout_agent.errors import NotWhole
from rollout_agent.gate import shared
from weightcast.devserver import SeaweedServer, ServerProcess, free_port

STEPS = 2
AGENTS = ("eu-west", "us-east")
Service = dict[str, Any]


@pytest.fixture(scope="module")
def compose(root: Path) -> dict[str, Any]:
    text = (root / "docker-compose.yml").read_text()
    chosen = {"WEIGHTCAST_STEPS": str(STEPS)}
    text = re.sub(r"(?<!\$)\$\{(\w+):-([^}]*)\}", lambda m: chosen.get(m[1], m[2]), text)
    found: dict[str, Any] = yaml.safe_load(text.replace("$$", "$"))
    return found


def ours(compose: dict[str, Any]) -> dict[str, Service]:
    return {name: service for name, service in compose["services"].items() if service["image"] == "weightcast:local"}


def test_the_parts_are_a_bucket_a_coordinator_a_trainer_and_two_regions(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {"minio", "bucket", "tokens", "coordinator", "trainer", *AGENTS}
    assert set(ours(compose)) == {"tokens", "coordinator", "trainer", *AGENTS}


def test_regions_see_neither_each_other_nor_the_trainer(compose: dict[str, Any]) -> None:
    networks = {name: set(service.get("networks", ())) for name, service in compose["services"].items()}
    assert not networks["eu-west"] & networks["us-east"]
    for agent in AGENTS:
        assert not networks[agent] & networks["trainer"]
        assert networks[agent] & networks["minio"]
        assert networks[agent] & networks["coordinator"]
    assert set().union(*networks.values()) == set(compose["networks"])


def test_everything_that_stays_up_has_a_health_check_and_a_pinned_image(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert "healthcheck" in service or name in {"bucket", "tokens"}
        assert ":" in service["image"]
        assert not service["image"].endswith(":latest")
        assert "privileged" not in service


def test_a_look_at_the_health_of_a_region_does_not_hash_its_model(compose: dict[str, Any]) -> None:
    for agent in AGENTS:
        test = compose["services"][agent]["healthcheck"]["test"]
        assert test[:3] == ["CMD", "weightcast", "gate"]
        assert "--no-verify" in test[: test.index("--")]


def test_nothing_is_published_beyond_loopback(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_working_weights_are_in_memory_and_state_is_on_disk(compose: dict[str, Any]) -> None:
    for agent in AGENTS:
        service = compose["services"][agent]
        assert any(mount.startswith("/models") for mount in service["tmpfs"])
        assert f"{agent}:/state" in service["volumes"]


def test_every_part_sees_its_own_token_and_the_coordinator_only_hashes(compose: dict[str, Any]) -> None:
    seen = {
        name: {volume.split(":")[0] for volume in service.get("volumes", ())} & {"trainer-token", "rollout-token"}
        for name, service in compose["services"].items()
        if name != "tokens"
    }
    wanted = {"trainer": {"trainer-token"}, "eu-west": {"rollout-token"}, "us-east": {"rollout-token"}}
    assert {name: volumes for name, volumes in seen.items() if volumes} == wanted
    mounts = [volume for service in compose["services"].values() for volume in service.get("volumes", ())]
    assert {mount.split(":")[0] for mount in mounts} == set(compose["volumes"])


def test_the_image_runs_our_command_without_root(compose: dict[str, Any], root: Path) -> None:
    build = compose["services"]["trainer"]["build"]
    lines = (root / build["context"] / build["dockerfile"]).read_text().splitlines()
    assert 'ENTRYPOINT ["weightcast"]' in lines
    assert "USER weightcast" in lines
    copied = [
        word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
    ]
    assert all((root / word).exists() for word in copied)


class Containers:
    """The services of the file as processes, with local addresses and directories in place of the file's."""

    def __init__(self, services: dict[str, Service], server: SeaweedServer, directory: Path, stack: ExitStack) -> None:
        self._services, self._directory, self._stack = services, directory, stack
        port = str(free_port())
        self._places = {
            "http://minio:9000": server.endpoint_url,
            "http://coordinator:8470": f"http://127.0.0.1:{port}",
            "http://127.0.0.1:8470": f"http://127.0.0.1:{port}",
            "--port=8470": f"--port={port}",
            "--host=0.0.0.0": "--host=127.0.0.1",
        }

    def mounted(self, name: str, path: str) -> str:
        """Where ``path`` of a container is here; paths that nothing is mounted on stay as they are."""
        service = self._services[name]
        mounts = {volume.split(":")[1]: f"volumes/{volume.split(':')[0]}" for volume in service.get("volumes", ())}
        mounts |= {mount.split(":")[0]: f"{name}{mount.split(':')[0]}" for mount in service.get("tmpfs", ())}
        for here in mounts.values():
            (self._directory / here).mkdir(parents=True, exist_ok=True)
        for mount, here in mounts.items():
            if path == mount or path.startswith(mount + "/"):
                return str(self._directory / here) + path.removeprefix(mount)
        return path

    def start(self, name: str) -> ServerProcess:
        service = self._services[name]
        argv = [*service.get("entrypoint", ["weightcast"]), *service["command"]]
        process = ServerProcess(
            self._argv(name, argv),
            cwd=self._directory,
            log_path=self._directory / f"{name}.log",
            env=self._environment(name),
        )
        self._stack.callback(process.stop)
        return process

    def healthy(self, name: str) -> bool:
        kind, *command = self._services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        try:
            done = subprocess.run(
                self._argv(name, command), env=self._environment(name), capture_output=True, timeout=60, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def _argv(self, name: str, command: list[str]) -> list[str]:
        return [self._local(name, word) for word in command]

    def _local(self, name: str, word: str) -> str:
        for theirs, here in self._places.items():
            word = word.replace(theirs, here)
        # A loop variable is no directory yet: what it stands for is mounted like its siblings.
        word = word.replace("/tokens/$scope/", f"{self._directory}/volumes/$scope-token/")
        return re.sub(r"(?<![\w/:.])/(?:models|state|tokens)[\w/.]*", lambda m: self.mounted(name, m[0]), word)

    def _environment(self, name: str) -> dict[str, str]:
        # `weightcast` and `python` are those of this environment, as in the image.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        machine = {"PATH": path, "HOME": str(self._directory), "TMPDIR": str(self._directory)}
        given = {name_: self._local(name, value) for name_, value in self._services[name]["environment"].items()}
        return machine | given


@pytest.fixture
def containers(compose: dict[str, Any], tmp_path: Path) -> Iterator[Containers]:
    keys = compose["services"]["minio"]["environment"]
    with (
        SeaweedServer(access_key=keys["MINIO_ROOT_USER"], secret_key=keys["MINIO_ROOT_PASSWORD"]) as server,
        ExitStack() as stack,
    ):
        server.create_bucket("weightcast")
        yield Containers(ours(compose), server, tmp_path, stack)


def test_every_command_line_runs_and_both_regions_end_with_the_same_weights(containers: Containers) -> None:
    tokens = containers.start("tokens")
    wait_for(lambda: not tokens.running, 120)
    assert tokens.log_tail().count("added ") == 2, tokens.log_tail()
    coordinator = containers.start("coordinator")
    coordinator.wait_until(lambda: containers.healthy("coordinator"))
    trainer = containers.start("trainer")
    agents = {name: containers.start(name) for name in AGENTS}
    wait_for(lambda: not trainer.running, 240)
    assert f"version {STEPS}: step {STEPS}" in trainer.log_tail(), trainer.log_tail()
    assert containers.healthy("trainer")
    for name, agent in agents.items():
        model = Path(containers.mounted(name, "/models/demo"))
        agent.wait_until(lambda name=name, model=model: held(model) == STEPS and containers.healthy(name))  # type: ignore[misc]
    models = [Path(containers.mounted(name, "/models/demo")) for name in AGENTS]
    assert tensors(models[0]) == tensors(models[1])
    assert len(tensors(models[0])) > 50


def held(model: Path) -> int:
    """The version that a directory holds, 0 if it is not whole."""
    try:
        with shared(model, timeout_s=0.1) as whole:
            return whole.position.version
    except NotWhole:
        return 0


def tensors(model: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                found[name] = file.get_tensor(name).view(torch.uint8).numpy().tobytes()
    return found


def wait_for(condition: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
