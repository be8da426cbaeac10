"""A report that holds Infinity or NaN is refused: answers that repeated it would be JSON for nobody."""

from __future__ import annotations

from typing import Any

import httpx
import pytest


@pytest.mark.parametrize("number", ["Infinity", "NaN", "1e999"])
async def test_a_time_without_end_is_refused(job: Any, node: Any, number: str) -> None:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(node.app), base_url="http://coordinator")
    answer = await job.publish(step=1)
    headers = {"Content-Type": "application/json"}
    report = f'{{"run_id":"{answer.run_id}","state":"serving","apply_s":{number}}}'
    told = await http.put("/v1/runs/demo/regions/eu/agents/a", content=report, headers=headers)
    assert told.status_code == 422, told.text
    report = f'{{"term":{answer.term},"sha256":"{"0" * 64}","encode_s":{number}}}'
    told = await http.put(f"/v1/runs/demo/versions/{answer.version}/receipts/0", content=report, headers=headers)
    assert told.status_code == 422, told.text
    assert await node.client.regions("demo") == []
    assert (await node.client.version("demo", 1)).encode_s == 0.5
    await http.aclose()
