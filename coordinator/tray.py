"""What a coordinator has gathered of the undecided version: receipts, signs that somebody still works on it, and which
ranks said that they cannot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.decisions import Unreadable
from weight_store.receipt import Receipt
from weight_store.version import Open, Withdrawal

SHARES = 4
"""Signs of life are passed on to other coordinators this often within the time after which a version expires."""


@dataclass(slots=True)
class Tray:
    """One undecided version. ``alive_s``: when its last sign of life came here (monotonic seconds).

    A rank reports its progress to one coordinator; what the others need is left in the bucket, numbered from 0.
    ``shared_n`` of those signs were seen here, the last one was left from here at ``shared_s``.
    """

    opened: Open
    alive_s: float
    shared_s: float
    shared_n: int = 0
    receipts: dict[int, tuple[Receipt, bytes] | Unreadable] = field(default_factory=dict)
    withdrawals: dict[int, Withdrawal] = field(default_factory=dict)
    next_probe: int = 0

    def missing(self) -> list[int]:
        """Ranks whose receipt has not been read, in order."""
        return [rank for rank in range(self.opened.world_size) if rank not in self.receipts]

    def to_probe(self, most: int) -> list[int]:
        """The next few missing ranks; successive calls go round all of them."""
        missing = self.missing()
        start = self.next_probe % len(missing) if missing else 0
        self.next_probe = start + most
        return (missing[start:] + missing[:start])[:most]

    def note_sign(self, now_s: float, expire_after_s: float) -> bool:
        """Note a sign of life; whether it is time to leave one for other coordinators."""
        self.alive_s = now_s
        due = now_s - self.shared_s >= expire_after_s / SHARES
        if due:
            self.shared_s = now_s
        return due
