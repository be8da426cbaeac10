"""A picture of size against speed, one panel a case. Drawn by matplotlib, if it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from weightcast.measure.bench import CaseResult, Report, Row
from weightcast.measure.report import title_of

_COLUMNS = 3
_PANEL_INCHES = (5.0, 3.8)


def draw(report: Report, path: Path) -> bool:
    """Write a PNG to ``path``; False, and no file, if matplotlib is not installed or nothing was measured."""
    if importlib.util.find_spec("matplotlib") is None or not report.cases:
        return False
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    columns = min(_COLUMNS, len(report.cases))
    rows = -(-len(report.cases) // columns)
    size = (_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows + 1)
    figure, panels = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    coders = dict.fromkeys(row.coder for case in report.cases for row in case.rows if row.note is None)
    colours = {coder: f"C{index}" for index, coder in enumerate(coders)}
    for panel in panels.flat[len(report.cases) :]:
        panel.set_axis_off()
    handles: dict[str, Any] = {}
    for panel, case in zip(panels.flat, report.cases, strict=False):
        handles |= _panel(panel, case, colours)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6)
    figure.suptitle("Triangles encode, circles decode; down is smaller, right is faster")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _panel(panel: Any, case: CaseResult, colours: dict[str, str]) -> dict[str, Any]:
    """Draw one case; returns the lines by their name in the legend."""
    lines = {row.coder: _points(panel, row, colours[row.coder]) for row in case.rows if row.note is None}
    if case.floor_bytes > 0:
        floor = 100 * case.floor_bytes / case.raw_bytes
        lines["floor"] = panel.axhline(floor, linestyle="--", color="black", linewidth=0.8)
    lines["memcpy"] = panel.axvline(case.memcpy_gbps, linestyle=":", color="black", linewidth=0.8)
    panel.set(xscale="log", yscale="log", title=title_of(case), xlabel="GB/s of CPU time", ylabel="% of the weights")
    for level in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
        level(lambda value, _: f"{value:g}")
    panel.tick_params(axis="y", which="both", labelsize=7)
    return lines


def _points(panel: Any, row: Row, colour: str) -> Any:
    """A triangle, a circle, and the line between them."""
    speeds = [speed for speed in (row.encode_gbps, row.decode_gbps) if speed is not None]
    if row.encode_gbps is not None:
        panel.plot(row.encode_gbps, row.percent, "<", color=colour)
    if row.decode_gbps is not None:
        panel.plot(row.decode_gbps, row.percent, "o", color=colour)
    (line,) = panel.plot(speeds, [row.percent] * len(speeds), "-", color=colour)
    return line
