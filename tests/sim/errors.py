"""How a simulation ends, if not well."""

from __future__ import annotations


class Violation(AssertionError):
    """A promise was broken; the sentence says which, where and when."""


class Stuck(Violation):
    """Everybody waits for something that will never come."""


class Defect(Violation):
    """Code raised what no rule foresees."""


class Killed(BaseException):
    """The process that tried to do something is dead. Not an Exception: nothing may handle it."""
