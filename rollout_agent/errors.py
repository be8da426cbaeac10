"""What can go wrong on the rollout side, grouped by what the caller does about it.

::

    RolloutError
    ├── RunError                 a person must choose another directory, run or pattern
    │   ├── WrongRun             the directory or the bucket belongs to another run
    │   ├── ForeignFiles         the directory holds weights that this agent did not write
    │   ├── AgentRunning         another agent keeps this directory
    │   └── NothingSelected      no tensor of the run matches the patterns
    ├── Rewind                   the head is older than, or not on the way of, what is held: keep what is held
    ├── DamagedFiles             working files differ from their digests: refetch those groups
    ├── DamagedObject            an object of the bucket does not become what its receipt says: fetch it again
    ├── DiskError                the local disk
    │   ├── DiskFull             free space; nothing was half applied
    │   └── DiskFailed           the disk did not do what it was asked: what it holds is not trusted
    ├── NotWhole                 no whole version in the directory (yet)
    ├── EngineRefused            the engine did not confirm: the version stays staged
    │   ├── EngineAbsent         nobody is there who could be loading
    │   └── EngineSilent         it did not answer and may be loading still: nothing changes before it does
    └── EngineLoading            an engine may be reading the files: the next version waits for its answer

Each class has a stable ``code`` (append only).
"""

from __future__ import annotations


class RolloutError(Exception):
    """Base of every error of this package; never raised itself."""

    code = "rollout"


class RunError(RolloutError):
    """Base of what only a person can put right; never raised itself."""

    code = "run"


class WrongRun(RunError):
    """A directory, head or manifest names another run than the one followed."""

    code = "wrong-run"


class ForeignFiles(RunError):
    """The model directory holds weights or settings that were not written by an agent."""

    code = "foreign-files"


class AgentRunning(RunError):
    """Another process keeps the same directory."""

    code = "agent-running"


class NothingSelected(RunError):
    """The include patterns select no tensor."""

    code = "nothing-selected"


class Rewind(RolloutError):
    """The head names a version older than the one held, or another history of the same version."""

    code = "rewind"


class DamagedFiles(RolloutError):
    """Working files are missing, cut or altered; the sentence names group, expected and found digest."""

    code = "damaged-files"


class DamagedObject(RolloutError):
    """A shard's payload does not decode, or decodes to other bytes than its receipt promises."""

    code = "damaged-object"


class DiskError(RolloutError):
    """Base of what the local disk refuses; never raised itself."""

    code = "disk"


class DiskFull(DiskError):
    """No space, quota or file-size limit left."""

    code = "disk-full"


class DiskFailed(DiskError):
    """A read, write or sync failed; after a failed sync nothing about the file's pages is known."""

    code = "disk-failed"


class NotWhole(RolloutError):
    """The directory holds no whole version, or none before the time was up."""

    code = "not-whole"


class EngineRefused(RolloutError):
    """The engine's hook failed or answered with an error: it does not load this version now."""

    code = "engine-refused"


class EngineAbsent(EngineRefused):
    """Nobody listens where the engine should be: whatever it was told before, it loads no more."""

    code = "engine-absent"


class EngineSilent(EngineRefused):
    """The engine was reached and did not answer: it may be loading, and is told again until it answers."""

    code = "engine-silent"


class EngineLoading(RolloutError):
    """Another version would take the place of files that an engine was told of and may be reading."""

    code = "engine-loading"
