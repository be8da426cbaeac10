"""What an ulp_v1 body is made of: counted by the reference decoder as it decodes."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

from numpy.typing import NDArray

from codec import dtypes, reference_ulp

KINDS = ("change", "skip", "short step", "long step", "exponent", "exponent below 0", "other sign", "escape")


def fields(dtype: str) -> reference_ulp.Fields:
    """The bits of a dtype."""
    info = dtypes.find(dtype)
    return reference_ulp.Fields(8 * info.item_bytes, info.exponent_bits, info.mantissa_bits)


def kinds_of(base: NDArray[Any], body: bytes, dtype: str) -> Counter[str]:
    """How often each of ``KINDS`` occurs. A change is also a value; a step is long if raw bits follow its symbol."""
    found: Counter[str] = Counter()
    take, decode_value = reference_ulp.Decoder.take, reference_ulp.decode_value

    def event(self: reference_ulp.Decoder, start: int, width: int, bits: int) -> None:
        if bits == reference_ulp.CHANCE_BITS:
            found["change" if start else "skip"] += 1
        take(self, start, width, bits)

    def value(old: int, model: reference_ulp.Model, d: reference_ulp.Decoder) -> int:
        v = model.value_model(old)
        symbol = v.symbol_at(d.state % (1 << reference_ulp.TOTAL_BITS))
        if v.mode == 0:
            found["long step" if reference_ulp.step_range(symbol)[1] else "short step"] += 1
        elif symbol == reference_ulp.ESCAPE:
            found["escape"] += 1
        else:
            found["exponent"] += 1
            found["exponent below 0"] += symbol // 2 > v.top
            found["other sign"] += symbol % 2
        return decode_value(old, model, d)

    with (
        mock.patch.object(reference_ulp.Decoder, "take", event),
        mock.patch.object(reference_ulp, "decode_value", value),
    ):
        reference_ulp.decode(base, body, fields(dtype))
    return +found
