"""What the agent owes an engine that it told of a version: the files stay that version's until it answers.

Such an engine may read straight from the directory, gate or no gate, so nobody else can tell when it has finished. It
may outlive the agent: therefore a note on disk says that an answer is due, and a command that was run for the version
holds a lock for as long as it runs. The agent that comes next lets the command end, tells the engine again of what the
files hold, and goes on once it has answered.
"""

from __future__ import annotations

from rollout_agent import presence
from rollout_agent.disk import Disk, Lock
from rollout_agent.errors import EngineLoading, EngineSilent
from rollout_agent.places import Places
from rollout_agent.state import Told, load, seal
from weight_store.position import Position


class Telling:
    """The version that an engine was told of and has not answered to, if there is one."""

    def __init__(self, disk: Disk, places: Places) -> None:
        self.position: Position | None = None
        self._disk = disk
        self._places = places
        self._lock: Lock | None = None

    def recall(self, run_id: str | None) -> None:
        """Learn what an agent before this one left open, in this boot: no engine outlives its machine."""
        found = load(self._disk, self._places.told, Told)
        if found is not None and (found.run_id, found.boot_id) == (run_id, self._disk.boot_id()):
            self.position = found.position

    def begin(self, run_id: str, position: Position) -> tuple[int, ...]:
        """Note that an engine is told of ``position``, which the files hold; descriptors for a command to inherit.

        Raises ``EngineSilent`` while a command that an earlier agent ran goes on.
        """
        if self._lock is None or not self._lock.in_place():
            self._lock = self._disk.try_lock(self._places.gate_told, shared=False)
        if self._lock is None:
            raise EngineSilent(
                f"a command that an earlier agent ran for {self._places.model} still runs (it locks "
                f"{self._places.gate_told}): version {position.version} is told once it has ended"
            )
        told = Told(run_id=run_id, position=position, boot_id=self._disk.boot_id())
        # Not synced: it means nothing after a power loss.
        presence.put(self._disk, self._places.told, seal(told))
        self.position = position
        return () if self._lock.descriptor is None else (self._lock.descriptor,)

    def end(self) -> None:
        """Note that it has answered, whatever it said. Calling it twice is allowed."""
        self.position = None
        self._disk.remove(self._places.told)
        self.leave()

    def leave(self) -> None:
        """Let go of the lock, leaving the note for the agent that comes next. Calling it twice is allowed."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def check(self) -> None:
        """Raise ``EngineLoading`` unless another version may take the place of the one held."""
        if self.position is not None:
            raise EngineLoading(
                f"an engine was told of version {self.position.version}, has not answered and may be reading the "
                "files: another version waits for it (`weightcast rollout` asks it again; where nothing loads any "
                "more, Replica.told() says so)"
            )
