"""A start that gets no further says what it waits for, where, and what to do; so does a publication that hangs."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import trustme

from tests.trainer_agent.silent import attached_desk
from trainer_agent import Publisher
from trainer_agent.errors import SetupRefused, StillUndecided, Unreachable
from trainer_agent.messages import Failed, Waiting
from weightcast.commands import trainer
from weightcast.devserver import free_port

STATE = {"w": torch.ones(8)}


def why_it_waits(publisher: Publisher, sentence: str) -> str:
    """What publications answer once they know more than that the sidecar is still starting."""
    deadline_s = time.monotonic() + 60
    while True:
        error = publisher.publish(STATE, 0).error
        assert isinstance(error, Unreachable)
        if sentence in str(error) or time.monotonic() > deadline_s:
            return str(error)


def test_a_coordinator_that_is_not_there_is_named(tmp_path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with Publisher(run="r", store=f"file://{tmp_path}", coordinator=url, start_timeout_s=0.3) as publisher:
        assert isinstance(publisher.publish(STATE, 0).error, Unreachable)  # the sidecar has not even started
        said = why_it_waits(publisher, "check that it runs")
    assert f"taking over run r: the coordinator at {url} does not answer: check that it runs, its address" in said


def test_a_store_that_is_not_there_is_named(service, aws_environment) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    store = f"s3://bucket/prefix?endpoint={endpoint}&region=us-east-1"
    with Publisher(run="r", store=store, coordinator=service.url, start_timeout_s=0.3) as publisher:
        said = why_it_waits(publisher, endpoint)
    assert f"{endpoint} cannot be reached: check that the store runs" in said


def test_a_wrong_secret_key_ends_the_start_at_once(service, s3_url, monkeypatch) -> None:
    store = s3_url("wrong-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-key")
    with (
        Publisher(run="r", store=store, coordinator=service.url) as publisher,
        pytest.raises(SetupRefused, match="secret key does not belong to the access key: check AWS_SECRET_ACCESS_KEY"),
    ):
        publisher.publish(STATE, 0)


def test_a_bucket_that_is_not_there_ends_the_start_at_once(service, s3_url) -> None:
    store = s3_url("there").replace("s3://there", "s3://not-there")
    with (
        Publisher(run="r", store=store, coordinator=service.url) as publisher,
        pytest.raises(SetupRefused, match=r"bucket 'not-there' does not exist at .*: create it, or correct"),
    ):
        publisher.publish(STATE, 0)


def test_keys_that_may_not_write_end_the_start_at_once(make_service, s3_url, read_only_keys, monkeypatch) -> None:
    service = make_service(s3_url("read-only-start"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", read_only_keys[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", read_only_keys[1])
    with (
        Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher,
        pytest.raises(SetupRefused, match=r"access to bucket 'read-only-start' at .* is denied.*s3:PutObject"),
    ):
        publisher.publish(STATE, 0)


def test_a_certificate_that_nobody_vouched_for_is_named(make_service, tmp_path: Path) -> None:
    issued = trustme.CA().issue_cert("127.0.0.1")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    issued.cert_chain_pems[0].write_to_path(str(chain))
    issued.private_key_pem.write_to_path(str(key))
    service = make_service(tls=(str(chain), str(key)))
    url = service.url.replace("http://", "https://")
    with Publisher(run="r", store=service.store_url, coordinator=url, start_timeout_s=0.3) as publisher:
        said = why_it_waits(publisher, "TLS certificate")
    assert (
        f"the TLS certificate of the coordinator at {url} is not trusted: name its authority in WEIGHTCAST_CA" in said
    )


def test_a_rank_that_offers_nothing_is_named(service, launch_ranks) -> None:
    ranks = launch_ranks(service, 2, start_timeout_s=0.3)
    said = why_it_waits(ranks.publishers[0], "not offered")
    assert "have not agreed on a layout: rank 1 has not offered any pieces yet" in said


def test_later_too_what_a_step_waits_for_is_said(make_service) -> None:
    service = make_service()
    with Publisher(run="r", store=service.store_url, coordinator=service.url, max_wait_s=0.5) as publisher:
        publisher.publish(STATE, 0).sealed(60)
        service.stop()
        waiting = publisher.publish({"w": STATE["w"] * 2}, 1)
        with pytest.raises(TimeoutError, match=f"step 1 is not decided after 3 s: .*{service.url} does not answer"):
            waiting.sealed(3)
        dropped = publisher.publish(STATE, 2).error
        assert isinstance(dropped, StillUndecided)
        assert f"{service.url} does not answer" in str(dropped)
        service.start()
        assert waiting.sealed(60) == 2


def test_a_watcher_says_what_a_checkpoint_waits_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    desk, arena, tell = attached_desk(tmp_path)
    handle = desk.new_handle(0, step=7)
    desk.publish(handle, slot=0, copy_s=0)
    tell(Waiting(reason="the store does not answer"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(trainer._wait, handle, "step_7", trainer.Stopping(), 0.01)
        deadline_s = time.monotonic() + 60
        while not (said := capsys.readouterr().err) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        tell(Failed(ordinal=0, code="version-aborted", message="given up"))
        waiting.result(60)
    assert said == "step_7 is not published yet: it is undecided after 0.01 s: the store does not answer\n"
    assert not capsys.readouterr().err
    arena.remove()
