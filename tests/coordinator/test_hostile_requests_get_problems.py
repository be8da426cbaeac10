"""Requests made up from the OpenAPI description, valid and not, against a real server with a run in its bucket.

Whatever comes gets an answer that the description names: never a 500, never another content type or shape.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coordinator.app import create_app
from coordinator.protocol import BoundedProtocol

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
)
EXAMPLES = int(os.environ.get("WEIGHTCAST_FUZZ_EXAMPLES", "0"))
"""Of random requests for each route, beside those at and beyond every bound that the description names."""


async def test_every_answer_is_one_that_the_api_describes(
    job: Any, place: Any, listen: Callable[..., str], tmp_path: Path
) -> None:
    await job.publish(step=1)
    await job.open(step=2)
    app = create_app(place.store)
    app.state.coordinator.registry.stop_waiting()  # polls and streams end at once
    url = listen(app, http=BoundedProtocol)
    tested = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("schemathesis")),
        *("run", f"{url}/openapi.json", "--phases", "coverage,fuzzing" if EXAMPLES else "coverage"),
        *("--max-examples", str(EXAMPLES or 1), "--checks", ",".join(CHECKS)),
        *("--generation-deterministic", "--continue-on-failure"),
        *("--warnings", "off", "--request-timeout", "30", "--no-color"),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await tested.communicate()
    told = output.decode()
    assert tested.returncode == 0, told
    assert "Selected: 19/19" in told
