"""Promise: a trainer that goes on writing while its weights are encoded gets an error or a delta, and stays alive."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import codec
from codec import ulp


@pytest.mark.parametrize("share", [0.001, 0.5])
def test_writes_beside_the_encoder_never_end_the_process(share):
    rng = np.random.default_rng(1)
    base = rng.integers(0, 1 << 16, 1 << 18, dtype=np.uint16)
    moved = np.where(rng.random(base.size) < share, rng.integers(0, 1 << 16, base.size, dtype=np.uint16), base)
    new, done = base.copy(), threading.Event()

    def train():
        while not done.is_set():
            np.copyto(new, moved)
            np.copyto(new, base)

    trainer = threading.Thread(target=train)
    trainer.start()
    said = set()
    try:
        for _ in range(60):
            try:
                ulp.encode_counted(base, new, "BF16")
            except codec.InvalidInput as error:
                said.add(str(error))
    finally:
        done.set()
        trainer.join()
    assert all("changed while they were encoded" in sentence for sentence in said)
