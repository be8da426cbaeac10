"""Why a version is given up, as the record that says so. Pure; decisions.py decides when."""

from __future__ import annotations

from collections.abc import Sequence

from weight_store.version import MAX_DETAIL, MAX_NAMED_RANKS, Abort, AbortReason, Open

_SHOWN_RANKS = 10


def fenced(opened: Open, launch: str, write_id: str) -> Abort:
    """``launch`` took the run over before the version was decided."""
    detail = f"term {opened.term} ended before version {opened.version} was decided: launch {launch} took over"
    return _abort(opened, "fenced", detail, write_id)


def refused(opened: Open, sentence: str, write_id: str) -> Abort:
    """The receipts are all there, and ``sentence`` says what is wrong with them."""
    return _abort(opened, "refused", sentence, write_id)


def expired(opened: Open, missing: Sequence[int], quiet_s: float, trouble: str, write_id: str) -> Abort:
    """No sign of life for ``quiet_s``: receipts of ``missing`` ranks did not come, or ``trouble`` stood in the way."""
    more = len(missing) - _SHOWN_RANKS
    named = ", ".join(map(str, missing[:_SHOWN_RANKS])) + (f" and {more} more" if more > 0 else "")
    what = f"no receipt of rank {named}: look at the log of that rank's sidecar" if missing else trouble
    detail = (
        f"version {opened.version} (step {opened.step}) could not be sealed, and for {quiet_s:g} s "
        f"there was no sign of life: {what}"
    )
    return _abort(opened, "expired", detail, write_id, tuple(missing[:MAX_NAMED_RANKS]))


def _abort(opened: Open, reason: AbortReason, detail: str, write_id: str, missing: tuple[int, ...] = ()) -> Abort:
    return Abort(
        run_id=opened.run_id,
        version=opened.version,
        term=opened.term,
        reason=reason,
        detail=detail[:MAX_DETAIL],
        missing=missing,
        write_id=write_id,
    )
