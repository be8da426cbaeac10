"""Which launches may still take a run over. Pure."""

from __future__ import annotations

from coordinator.errors import Fenced, WrongRun
from weight_store.head import Head


def check_not_retired(head: Head, launch: str) -> None:
    """``Fenced`` if ``launch`` had the run and lost it."""
    if launch in head.retired:
        raise Fenced(
            f"launch {launch} lost the run to launch {head.launch} (term {head.term}) and cannot take it back; "
            "start the training job anew to take it over"
        )


def check_expected(head: Head, launch: str, expected_term: int) -> None:
    """``Fenced`` or ``WrongRun`` unless the run is still in the term in which ``launch`` saw it."""
    if head.term > expected_term:
        raise Fenced(
            f"launch {head.launch} took the run over (term {head.term}) after launch {launch} had seen it in term "
            f"{expected_term}, and keeps it; start the training job anew to take it over"
        )
    if head.term < expected_term:
        raise WrongRun(
            f"the run that was in term {expected_term} was replaced by another one of its name, now in term "
            f"{head.term}: start the training job anew to take that one over"
        )
