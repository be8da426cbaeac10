"""What the agent owes an engine that it told of a version: the files stay that version's until it answers.

Such an engine may read straight from the directory, gate or no gate, so nobody else can tell when it has finished.
"""

from __future__ import annotations

from rollout_agent.errors import EngineLoading
from weight_store.position import Position


class Telling:
    """The version that an engine was told of and has not answered to, if there is one."""

    def __init__(self) -> None:
        self.position: Position | None = None

    def begin(self, position: Position) -> None:
        """Note that an engine is told of ``position``, which the files hold."""
        self.position = position

    def end(self) -> None:
        """Note that it has answered, whatever it said. Calling it twice is allowed."""
        self.position = None

    def check(self) -> None:
        """Raise ``EngineLoading`` unless another version may take the place of the one held."""
        if self.position is not None:
            raise EngineLoading(
                f"an engine was told of version {self.position.version} and may be reading the files: "
                "another version waits for its answer"
            )
