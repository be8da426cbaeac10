"""How a rank that can never send its shard of a version says so, that nobody waits for it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from coordinator.errors import CoordinatorError, Fenced
from coordinator.wire import MAX_SENTENCE, WithdrawalReport
from trainer_agent.patience import TRANSIENT
from trainer_agent.session import GivenUp, Interrupted, Observed, Refused
from weight_store.errors import ObjectNotFound, WeightStoreError
from weight_store.keys import manifest_key, open_key
from weight_store.reading import read_agreed
from weight_store.records import MAX_RECORD_BYTES, record_format
from weight_store.register import Existing, create_or_read
from weight_store.version import Abort, Open, Withdrawal, withdrawn

if TYPE_CHECKING:
    from trainer_agent.worker import Worker

_log = logging.getLogger(__name__)


async def withdraw(worker: Worker, version: int, why: Refused) -> Observed | GivenUp | Interrupted:
    """Give ``version`` up by the coordinator, or where none will do it, by the decision register itself.

    Tried again while both are away for a while. Raises what the coordinator raises if neither will have it for good.
    """
    run, rank = worker.config.run, worker.config.rank
    report = WithdrawalReport(
        term=worker.term, run_id=worker.run_id, code=why.code, sentence=why.message[:MAX_SENTENCE]
    )

    async def attempt() -> Observed | GivenUp | Interrupted:
        try:
            return Observed(await worker.coordinator.withdraw(run, version, rank, report))
        except Fenced:
            raise
        except CoordinatorError as error:
            try:
                return await _withdraw_in_bucket(worker, version, why)
            except TRANSIENT:
                raise
            except WeightStoreError as other:
                _log.info("version %d cannot be given up in the bucket either: %s", version, other)
                raise error from None

    return await worker.patience(f"giving version {version} up because of: {why.message}", attempt)


async def _withdraw_in_bucket(worker: Worker, version: int, why: Refused) -> GivenUp | Interrupted:
    """Create the register as a coordinator would; ``Interrupted`` if it holds a manifest: only the head tells more."""
    run, store = worker.config.run, worker.store
    key = open_key(run, version)
    try:
        blob, _ = await read_agreed(store, key)  # whose version this is decides whether it is given up
        opened = Open.parse(blob.data, key=key)
    except ObjectNotFound:
        return GivenUp()  # retention has passed it
    if (opened.run_id, opened.term) != (worker.run_id, worker.term):
        return GivenUp()  # of another run by this name, or of another launch: not ours to decide
    abort = withdrawn(opened, {worker.config.rank: Withdrawal(why.code, why.message)}, worker.nonce())
    key = manifest_key(run, version)
    found = await create_or_read(store, key, abort.to_bytes(), MAX_RECORD_BYTES)
    if isinstance(found, Existing) and record_format(found.data, key=key) != Abort.FORMAT:
        return Interrupted()
    return GivenUp()
