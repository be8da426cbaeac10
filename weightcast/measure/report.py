"""A report for people and for programs: Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

from weightcast.measure.bench import CaseResult, Report, Row

_HEAD = ("", "% of weights", "to ulp_v1", "bits per change", "encode GB/s", "decode GB/s", "without digest")
_LEGEND = (
    "Sizes hold everything sent; for ARC, the payloads alone. Speeds are GB of new weights a second of CPU time, best "
    "of several, one thread. ulp_v1, fields_v1, auto and PULSEPT1 hash the new weights with XXH3-128 in that time; "
    '"without digest" is encode / decode less the time of that hash on its own. Every row was decoded and compared bit '
    "for bit. ARCv3's size differs from call to call by up to a fifth, since its candidates race a clock: one more "
    "call waits for all of them, and the smallest is shown and decoded. The floor is the entropy of the changes given "
    "the old weights, one by one: exact for the synthetic BF16, FP16 and FP8 deltas; for the others estimated from the "
    "delta itself, given the old exponents, and too low where few weights changed."
)


def to_json(report: Report) -> str:
    """The whole report; keys are the field names of :mod:`weightcast.measure.bench`."""
    return json.dumps(asdict(report), indent=2)


def to_markdown(report: Report) -> str:
    """Sizes and speeds of all cases side by side, as a README wants them, then one table a case."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items() if version)
    blocks = [
        _overview(report, "Size, % of the weights", _size),
        _overview(report, "Encode / decode, GB/s of CPU time", _speed),
        f"{_LEGEND}\n\n{report.processor}; Python {report.python}; {versions}.",
        *(_table(case) for case in report.cases),
    ]
    return "\n\n".join(blocks) + "\n"


def _overview(report: Report, title: str, cell: Callable[[Row], str]) -> str:
    coders = list(dict.fromkeys(row.coder for case in report.cases for row in case.rows))
    lines = [_line([title, *coders]), _line(["---"] + ["---:"] * len(coders))]
    for case in report.cases:
        cells = {row.coder: cell(row) for row in case.rows}
        lines.append(_line([title_of(case), *(cells.get(coder, "") for coder in coders)]))
    return "\n".join(lines)


def _size(row: Row) -> str:
    return row.note or _number(row.percent, 4)


def _speed(row: Row) -> str:
    return row.note or f"{_number(row.encode_gbps, 2)} / {_number(row.decode_gbps, 2)}"


def title_of(case: CaseResult) -> str:
    """The case and how much of it changed."""
    return f"{case.name} ({100 * case.changed / max(1, case.elements):.3f} % changed)"


def _table(case: CaseResult) -> str:
    default = next((row.size_bytes for row in case.rows if row.coder == "ulp_v1"), None)
    floor = 8 * case.floor_bytes / case.changed if case.changed else None
    lines = [
        f"**{title_of(case)}**: {case.elements / 1e6:.1f} M weights, {', '.join(case.dtypes)}, {case.tensors} tensors",
        "",
        _line(_HEAD),
        _line(["---"] + ["---:"] * (len(_HEAD) - 1)),
        *(_line(_cells(row, default)) for row in case.rows),
        _line(["floor", _number(100 * case.floor_bytes / case.raw_bytes, 4), "", _number(floor, 2), "", "", ""]),
        _line(["memcpy", "100", "", "", _number(case.memcpy_gbps, 1), _number(case.memcpy_gbps, 1), ""]),
        _line(["XXH3-128", "", "", "", _number(case.xxh3_gbps, 1), _number(case.xxh3_gbps, 1), ""]),
    ]
    return "\n".join(lines)


def _cells(row: Row, default: int | None) -> Iterator[str]:
    yield row.coder
    if row.note is not None:
        yield row.note
        yield from [""] * (len(_HEAD) - 2)
        return
    yield _number(row.percent, 4)
    yield _number(row.size_bytes / default, 2) if row.size_bytes and default else ""
    yield _number(row.bits_per_change, 2)
    yield _number(row.encode_gbps, 3)
    yield _number(row.decode_gbps, 3)
    bare = (row.encode_bare_gbps, row.decode_bare_gbps)
    yield "" if bare == (row.encode_gbps, row.decode_gbps) else " / ".join(_number(value, 2) for value in bare)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
