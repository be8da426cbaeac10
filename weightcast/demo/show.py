"""Draws a demo: a live table on a terminal, a line a version elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weightcast.demo.proof import RegionProof
from weightcast.demo.story import Row, Story

_STATES = {"serving": "green", "staged": "yellow"}
_COLUMNS = ("version", "step", "reward", "changed", "payload", "of BF16", "copy", "encode", "upload", "seal")
_DISPENSABLE = ("step", "reward", "payload", "copy")
_WIDE_COLUMNS = 150
"""Terminals of fewer columns get a table without some of them."""


class Show:
    """What the person in front of it sees, as a context manager."""

    def __init__(self, story: Story, console: Console) -> None:
        self._story = story
        self._console = console
        live = Live(console=console, auto_refresh=False, vertical_overflow="visible")
        self._live = live if console.is_terminal else None
        self._printed: set[int] = set()
        self._status = ""

    @property
    def is_live(self) -> bool:
        """Whether a table is redrawn in place."""
        return self._live is not None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the table as it is; what is shown from now on comes below it."""
        if self._live is not None:
            self._live.stop()

    def say(self, sentence: str) -> None:
        """Show a sentence of its own, above the table."""
        self._console.print(Text(sentence))

    def status(self, words: str) -> None:
        """Show what is going on right now."""
        if words != self._status and self._live is None:
            self._console.print(Text(words))
        self._status = words

    def refresh(self) -> None:
        """Draw what changed since the last call."""
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)
            return
        for row in self._story.rows:
            if row.sealed.version not in self._printed and row.settled.issuperset(self._story.regions):
                self._printed.add(row.sealed.version)
                say_sealed(self._console, row)

    def prove(self, proofs: Sequence[RegionProof], compared: Sequence[int]) -> None:
        """Show the outcome of the final comparison, and how many versions were compared on the way."""
        table = Table(title="Trainer against each region, byte for byte (no digest of ours, read with safetensors)")
        for name in ("region", "tensors", "bytes compared", "different", "versions checked on the way", "result"):
            table.add_column(name, justify="left" if name in {"region", "result"} else "right")
        for proof, count in zip(proofs, compared, strict=True):
            result = Text("equal", "bold green") if proof.equal else Text("DIFFERENT", "bold red")
            numbers = (str(proof.tensors), f"{proof.compared_bytes:,}", str(len(proof.different)), str(count))
            table.add_row(proof.region, *numbers, result)
        self._console.print(table)
        if all(proof.equal for proof in proofs):
            self.say("Bit-exact: every region holds the trainer's weights, byte for byte.")
        for proof in proofs:
            for where in proof.different[:5]:
                self.say(f"{proof.region}: {where} differs")

    def _picture(self) -> RenderableType:
        table = Table(title="weightcast demo", expand=False)
        narrow = self._console.width < _WIDE_COLUMNS
        shown = [name for name in _COLUMNS if not (narrow and name in _DISPENSABLE)]
        for name in shown:
            table.add_column(name, justify="right", no_wrap=True)
        for region in self._story.regions:
            table.add_column(region, no_wrap=True)
        # A screenful: what is above has been served everywhere.
        for row in self._story.rows[-max(5, self._console.height - 8) :]:
            cells = dict(zip(_COLUMNS, _cells(row), strict=True))
            states = (_state(row.regions.get(region, ""), short=narrow) for region in self._story.regions)
            table.add_row(*(cells[name] for name in shown), *states)
        return Group(table, Text(self._status, "dim"))


def _cells(row: Row) -> list[str]:
    sealed, stepped = row.sealed, row.stepped
    reward = "-" if stepped is None or stepped.reward is None else f"{stepped.reward:.3f}"
    times = (sealed.copy_s, sealed.encode_s, sealed.upload_s, sealed.seal_s)
    return [
        str(sealed.version),
        str(sealed.step),
        reward,
        f"{row.changed:.2%}",
        f"{sealed.payload_bytes:,}",
        f"{row.ratio:.2%}",
        *(f"{seconds * 1000:.0f} ms" for seconds in times),
    ]


def _state(words: str, *, short: bool) -> Text:
    """What a region does with a version; in short its colour alone says which state it is."""
    state, _, lag = words.partition(" ")
    style = _STATES.get(state)
    return Text(lag if short and style else words, style or "dim")


def say_sealed(console: Console, row: Row) -> None:
    """Print one line about a version."""
    console.print(Text(_line(row)), soft_wrap=True)


def _line(row: Row) -> str:
    version, step, reward, changed, payload, share, copy, encode, upload, seal = _cells(row)
    regions = ", ".join(f"{region} {words}" for region, words in row.regions.items())
    line = (
        f"version {version}: step {step}, reward {reward}, {changed} changed, {payload} bytes ({share} of BF16), "
        f"copy {copy}, encode {encode}, upload {upload}, seal {seal}"
    )
    return f"{line}; {regions}" if regions else line
