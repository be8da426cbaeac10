"""What is shown follows from what happened: rows, lags, blows and the lines of a log."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from weightcast.demo import chaos
from weightcast.demo.boxes import rows_of
from weightcast.demo.errors import DemoError
from weightcast.demo.events import Event, EventLog, EventTail, Exported, Sealed, Stepped, Warming
from weightcast.demo.settings import DemoSettings, JobSettings
from weightcast.demo.show import Show
from weightcast.demo.story import Story


def sealed(version: int, step: int) -> Sealed:
    return Sealed(step, version, 1_000, 100_000, 0.01, 0.02, 0.03, 0.04, at_s=0.0)


def test_a_row_settles_when_its_region_serves_it() -> None:
    story = Story(["eu-west", "us-east"])
    story.add(Stepped(1, 5, 1000, 0.1, 0.5, 0.2))
    row = story.add(sealed(1, 1))
    assert row is not None
    assert (row.changed, row.ratio) == (0.005, 0.01)
    story.report("eu-west", staged=1, serving=0)
    assert row.regions["eu-west"].startswith("staged +")
    story.report("eu-west", staged=1, serving=1)
    story.report("us-east", staged=0, serving=0)
    assert row.regions["eu-west"].startswith("serving +")
    assert row.regions["us-east"] == "1 behind"
    assert not story.everywhere(1)
    story.report("us-east", staged=2, serving=2)
    assert story.everywhere(1)


def test_an_unknown_region_is_not_shown() -> None:
    story = Story(["eu-west"])
    row = story.add(sealed(1, 1))
    story.report("mars", staged=9, serving=9)
    assert row is not None
    assert list(row.regions) == ["eu-west"]


@pytest.mark.parametrize("terminal", [True, False])
def test_every_version_is_shown_once_it_is_served_everywhere(terminal: bool) -> None:
    output = io.StringIO()
    story = Story(["eu-west"])
    with Show(story, Console(file=output, force_terminal=terminal, width=200, height=40)) as show:
        show.status("training")
        for version in (1, 2):
            story.add(sealed(version, version + 10))
            story.report("eu-west", staged=version, serving=version)
            show.refresh()
            show.refresh()
    if terminal:
        assert "weightcast demo" in output.getvalue()
    else:
        lines = output.getvalue().splitlines()
        assert [line.partition(",")[0] for line in lines] == ["training", "version 1: step 11", "version 2: step 12"]


def test_events_arrive_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "events"
    tail = EventTail(path)
    assert list(tail.new()) == []
    log = EventLog(path)
    written: list[Event] = [Warming(1, 2, 0.5), Exported(0, 1, "ab"), sealed(1, 1)]
    for event in written[:2]:
        log.add(event)
    assert list(tail.new()) == written[:2]
    with path.open("ab") as file:
        file.write(b'{"kind": "Warm')
    assert list(tail.new()) == []
    log.close()


@pytest.mark.parametrize("steps", [6, 7, 10, 20, 100])
def test_blows_fall_in_order_and_the_resume_goes_back(steps: int) -> None:
    plan = chaos.plan(steps)
    assert [blow for _, blow in plan.blows] == list(chaos.Blow)
    at = [version for version, _ in plan.blows]
    assert at == sorted(set(at))
    assert plan.checkpoint_step is not None
    assert 1 <= plan.checkpoint_step < at[-1] < steps
    assert list(plan.due(steps, 0)) == list(chaos.Blow)
    assert list(plan.due(at[0], 1)) == []


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"steps": 0}, "at least one step"),
        ({"regions": 0}, "1 to 8 regions"),
        ({"ranks": 9}, "1 to 8 ranks"),
        ({"steps": 5, "chaos": True}, "at least 6 steps"),
        ({"model": Path("/nowhere")}, "no \\*.safetensors file"),
    ],
)
def test_impossible_demos_are_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(DemoError, match=sentence):
        DemoSettings(**settings)  # type: ignore[arg-type]


def test_job_settings_survive_their_file(tmp_path: Path) -> None:
    job = JobSettings("s", "c", tmp_path, 2, 20, attempt=3, model=tmp_path / "m", resume_step=4)
    job.save()
    assert JobSettings.load(job.path) == job
    assert job.first_step == 5


@pytest.mark.parametrize(("extent", "world_size"), [(97, 2), (5, 3), (2, 3), (0, 2), (1, 1)])
def test_rows_are_shared_out_like_torch_chunk(extent: int, world_size: int) -> None:
    shares = [rows_of(extent, rank, world_size) for rank in range(world_size)]
    assert [row for share in shares for row in share] == list(range(extent))
    assert max(len(share) for share in shares) == -(-extent // world_size)
