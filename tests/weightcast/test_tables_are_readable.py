"""On a terminal of 80 columns nothing is cut off and no number broken; in a pipe a row is a line, without colours."""

from __future__ import annotations

import io

import pytest
from click.testing import CliRunner
from rich.console import Console, RenderableType

from coordinator.wire import AgentAnswer, AgentReport, RegionAnswer, RegionVersion, RunAnswer, VersionAnswer
from weight_store.boxes import Box
from weight_store.layout import Layout
from weight_store.position import Position
from weightcast.commands import _tables, inspect, status

RUN_ID = "00000000-0000-4000-8000-000000000000"
LAUNCH = "9f" * 16


def position(version: int) -> Position:
    return Position(version=version, sha256="ab" * 32)


def region(name: str, agents: int) -> RegionAnswer:
    report = AgentReport(
        run_id=RUN_ID, state="fetching", staged=position(1234), serving=position(1233), error="[no] disk"
    )
    ids = [f"rollout-host-{i:03d}.{name}.example.com-0a1b2c3d" for i in range(agents)]
    answers = tuple(AgentAnswer(id=agent, region=name, age_s=3.4, report=report) for agent in ids)
    return RegionAnswer(region=name, target=1234, agents=answers)


REGIONS = (region("eu-west-1", 2), region("us-east-1", 1), region("ap-southeast-2", 1))
RUN = RunAnswer(
    run="a-run-with-a-long-name-0123456",
    run_id=RUN_ID,
    term=12,
    launch=LAUNCH,
    position=position(1234),
    undecided=1235,
    regions=REGIONS,
)
VERSION = VersionAnswer(
    run=RUN.run,
    run_id=RUN_ID,
    version=1234,
    term=12,
    step=101_234,
    ordinal=3,
    state="sealed",
    parent=position(1233),
    layout="cd" * 32,
    world_size=64,
    position=position(1234),
    payload_bytes=912_345_678,
    changed=2_876_543_210,
    elements=123_456_789_012,
    weight_bytes=246_913_578_024,
    encode_s=12.34,
    upload_s=23.45,
    seal_s=1.23,
    regions=tuple(
        RegionVersion(region=r.region, agents=128, staged=127, serving=126, lag_versions=0, lag_s=0.0) for r in REGIONS
    ),
)
OPEN = VERSION.model_copy(update={"version": 1235, "state": "undecided", "receipts": 17, "position": None})


def shown(width: int, *what: RenderableType) -> list[str]:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    for table in what:
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def status_at(width: int) -> list[str]:
    wide = width >= _tables.WIDE
    runs, versions = status._runs_table([RUN], wide=wide), status._versions_table([OPEN, VERSION], wide=wide)
    regions, agents = status._regions_table(REGIONS, [OPEN, VERSION]), status._agents_table(REGIONS, wide=wide)
    return shown(width, runs, versions, regions, agents)


def words(lines: list[str]) -> set[str]:
    return set(" ".join(lines).split())


def test_status_fits_80_columns_and_breaks_no_number_and_no_state() -> None:
    lines = status_at(80)
    assert max(map(len, lines)) <= 80
    wanted = {RUN.run, "1234", "1235", "101234", "sealed", "undecided", "2.330", "912.3", "MB", "17", "64", "ranks"}
    wanted |= {"eu-west-1", "ap-southeast-2", "127", "126", "fetching", "1233", "3", "ago"}
    assert wanted <= words(lines)
    assert "…" not in "".join(lines)


@pytest.mark.parametrize("lengths", [(40, 60), (63, 4), (4, 96), (15, 25), (13, 100)])
def test_long_names_of_region_and_agent_cut_nothing_off(lengths: tuple[int, int]) -> None:
    name, agent = (letter * length for letter, length in zip("ra", lengths, strict=True))
    (answer,) = region(name, 1).agents
    answers = (answer.model_copy(update={"id": agent, "age_s": 86_399.0}),)
    lines = shown(80, status._agents_table([RegionAnswer(region=name, agents=answers)], wide=False))
    assert max(map(len, lines)) <= 80
    assert {"heard", "from", "fetching", "1234", "1233", "86399", "s", "ago"} <= words(lines)
    assert sum(line.count("a") for line in lines[3:]) >= lengths[1]


def test_no_runs_are_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(connect: object) -> list[RunAnswer]:
        return []

    monkeypatch.setattr(status, "_runs", none)
    assert CliRunner().invoke(status.command, []).output == "no runs\n"


def test_a_wide_terminal_has_times_launch_and_digests_too() -> None:
    lines = status_at(200)
    assert {LAUNCH, "12.34", "23.45", "1.23", "1234@abababababab"} <= words(lines)
    assert any("eu-west-1 127, 126 of 128, us-east-1 127, 126 of 128" in line for line in lines)


def test_reasons_and_errors_are_sentences_below_the_tables() -> None:
    aborted = VERSION.model_copy(update={"state": "aborted", "reason": "no receipt of rank 3"})
    said = status._troubles([aborted], REGIONS[1:2])
    assert said == [
        "version 1234: no receipt of rank 3",
        "us-east-1, rollout-host-000.us-east-1.example.com-0a1b2c3d: [no] disk",
    ]


@pytest.fixture
def groups() -> list[inspect.Row]:
    names = [f"model.layers.17.{part}.weight" for part in ("input_layernorm", "mlp.experts.127.down_proj")]
    layout = Layout(
        world_size=2,
        names=tuple(names),
        dtypes=("BF16", "BF16"),
        itemsizes=(2, 2),
        shapes=((4096,), (4096, 1024)),
        piece_tensor=(0, 1, 1),
        piece_offsets=((0,), (0, 0), (2048, 0)),
        piece_sizes=((4096,), (2048, 1024), (2048, 1024)),
        group_owner=(0, 1),
        group_start=(0, 2),
    )
    return [
        {
            "group": 123456 + group.index,
            "tensors": inspect._tensors(group),
            "dtype": "BF16",
            "weights": 16_777_216,
            "changed": 16_777_216,
            "bytes": 33_554_432,
            "full": True,
            "digest": "0123456789abcdef" * 2,
        }
        for group in layout.groups
    ]


def test_groups_are_named_by_what_is_theirs(groups: list[inspect.Row]) -> None:
    first, second = (row["tensors"] for row in groups)
    assert first == (
        "model.layers.17.input_layernorm.weight … .mlp.experts.127.down_proj.weight[0:2048, 0:1024] (2 pieces)"
    )
    assert second == "model.layers.17.mlp.experts.127.down_proj.weight[2048:4096, 0:1024]"
    assert str(Box((2048, 0), (2048, 1024))) in second


def test_groups_of_a_rank_fit_80_columns(groups: list[inspect.Row]) -> None:
    console = Console(width=80, file=io.StringIO(), highlight=False)
    facts = {"run": "r", "step": None, "assets": ["config.json"] * 12, "layout": "cd" * 32}
    inspect._show(console, facts, groups)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert {"123456", "BF16", "16777216", "33554432", "yes", "cd" * 32, "none"} <= words(lines)
    assert len(lines) < 25


def test_in_a_pipe_a_row_is_a_line(groups: list[inspect.Row], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    with CliRunner().isolation() as streams:
        console = _tables.make_console()
        inspect._show(console, {"run": "r"}, groups)
        console.print(status._versions_table([VERSION], wide=console.width >= _tables.WIDE))
        output = streams[0].getvalue().decode()
    assert "\x1b" not in output
    (line,) = (line for line in output.splitlines() if "123456 " in line)
    assert groups[0]["tensors"] in line
    assert groups[0]["digest"] in line
    (line,) = (line for line in output.splitlines() if "101234" in line)
    assert "ap-southeast-2 127, 126 of 128" in line


def test_columns_of_the_environment_count_in_a_pipe_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with CliRunner().isolation():
        assert _tables.make_console().width == 80
