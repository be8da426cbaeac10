"""Weights that live on a GPU are published bit for bit. Needs one; skipped elsewhere."""

from __future__ import annotations

import pytest
import torch

from trainer_agent import Publisher
from weightcast import apply_delta, delta_compress, delta_decompress, encode_delta

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_masters_on_the_device_are_cast_there_and_arrive(service, make_state, moved, check_same) -> None:
    state = make_state()
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        for step in range(3):
            publisher.publish({name: tensor.cuda() for name, tensor in state.items()}, step).sealed(60)
            check_same(service.read("r").tensors, state)
            state = moved(state)


def test_what_an_iterator_computes_late_is_waited_for(service, check_same) -> None:
    """Each tensor is still being computed on the current stream when it is handed over."""
    weights = torch.randn(8, 1 << 20, device="cuda")

    def computed():
        for row in range(8):
            busy = weights[row]
            for _ in range(200):
                busy = (busy * 1.0001).sin()
            yield f"w.{row}", busy

    expected = {name: tensor.cpu() for name, tensor in computed()}
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        for step in range(2):  # the first is staged before there is a layout, the second copied as it comes
            publisher.publish(computed(), step).sealed(60)
            check_same(service.read("r").tensors, expected)


def test_what_is_changed_after_publish_does_not_show(service, check_same) -> None:
    tensor = torch.randn(1 << 22, device="cuda")
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        for step in range(2):
            before = {"w": tensor.cpu()}
            handle = publisher.publish({"w": tensor}, step)
            tensor.add_(1.0)
            handle.sealed(60)
            check_same(service.read("r").tensors, before)


def test_frames_of_tensors_on_the_device() -> None:
    base = torch.randn(1000, 33, dtype=torch.bfloat16, device="cuda")
    new = base.clone()
    new[::7] *= 1.01
    buffer = base.cpu()
    apply_delta(buffer, encode_delta(base, new))
    assert torch.equal(buffer.view(torch.int16), new.cpu().view(torch.int16))
    compressed, checksum = delta_compress(src=base, dst=new, compression_format="ulp_v1")
    restored = delta_decompress(src=base, compressed_diff=compressed, checksum=checksum, compression_format="ulp_v1")
    assert restored.is_cuda
    assert torch.equal(restored.view(torch.int16), new.view(torch.int16))
