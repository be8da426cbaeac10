"""The coordinator's typed client: one method a route. It retries nothing; see :func:`coordinator.backoff.retrying`.

Imports none of the server, so that agents need no web framework.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from coordinator.access import is_loopback
from coordinator.backoff import Backoff, retrying
from coordinator.credentials import Credentials
from coordinator.errors import BadRequest, CoordinatorError, CoordinatorUnreachable, error_for
from coordinator.wire import (
    AgentAnswer,
    AgentReport,
    HeadAnswer,
    HealthAnswer,
    LayoutAnswer,
    OfferReport,
    OpenRequest,
    Problem,
    ProgressReport,
    ReceiptReport,
    RegionAnswer,
    RunAnswer,
    TermAnswer,
    TermRequest,
    VersionAnswer,
    WaitAnswer,
    WithdrawalReport,
)

__all__ = ["Backoff", "CoordinatorClient", "Credentials", "Event", "retrying"]

A = TypeVar("A")
logger = logging.getLogger(__name__)

_MAX_ANSWER_BYTES = 64 << 20
_MAX_EVENT_BYTES = 1 << 20
_CONNECT_S = 5.0
_SILENCE_S = 60.0
"""An event stream says something every 15 s (a keep-alive comment at least)."""


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event; ``id`` is what to resume after, ``data`` JSON. See ``GET /v1/runs/{run}/events``."""

    name: str
    data: str
    id: str


class CoordinatorClient:
    """Talks to one coordinator, or to several behind one address.

    Every method raises the :class:`~coordinator.errors.CoordinatorError` that the answer names, or
    ``CoordinatorUnreachable`` when there is no proper answer. Use it as an async context manager, or call
    :meth:`close`. ``transport`` replaces the network (tests pass ``httpx.ASGITransport``); ``timeout_s`` is how long
    an answer may take beyond the ``wait_s`` asked for. ``headers`` are sent along, for proxies that want them.
    ``credentials`` are a token and whom TLS trusts; left out, they come from the environment.
    """

    def __init__(
        self,
        base_url: str,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        timeout_s: float = 30.0,
        headers: dict[str, str] | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        url = _checked_url(base_url)
        self._base = str(url).rstrip("/")
        self._timeout_s = timeout_s
        # A proxy from the environment cannot reach this machine's own loopback, nor what a test passes as transport.
        trust_env = transport is None and not is_loopback(url.host)
        credentials = credentials or Credentials.from_environment()
        auth = credentials.auth()
        if auth is not None and url.scheme == "http" and trust_env:
            logger.warning("the token goes to %s readable for everybody on the way: use https", url.host)
        self._http = httpx.AsyncClient(
            transport=transport,
            # A body of ours is small; unpacking what a stranger packed could fill the memory from one packet.
            headers={"Accept-Encoding": "identity", **(headers or {})},
            auth=auth,
            verify=credentials.verify(),
            trust_env=trust_env,
            # A redirection could carry the token elsewhere.
            follow_redirects=False,
        )

    def __repr__(self) -> str:
        return f"CoordinatorClient({self._base!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Calling it twice is allowed."""
        await self._http.aclose()

    # Trainers

    async def takeover(self, run: str, request: TermRequest) -> TermAnswer:
        """``POST /v1/runs/{run}/terms``: start a term, or (``takeover`` false) wait for rank 0's."""
        return await self._ask(TermAnswer, "POST", _run(run, "terms"), body=request, wait_s=request.wait_s)

    async def report_offer(self, run: str, term: int, rank: int, report: OfferReport) -> LayoutAnswer:
        """``PUT .../terms/{term}/offers/{rank}``: the offer is in the bucket."""
        return await self._ask(LayoutAnswer, "PUT", _run(run, "terms", term, "offers", rank), body=report)

    async def layout(self, run: str, term: int, world_size: int, *, wait_s: float = 0) -> LayoutAnswer:
        """``GET .../terms/{term}/layout``: the layout once all ranks have offered, or who is missing."""
        query = {"world_size": world_size, "wait": wait_s}
        return await self._ask(LayoutAnswer, "GET", _run(run, "terms", term, "layout"), query, wait_s=wait_s)

    async def open_version(self, run: str, request: OpenRequest) -> VersionAnswer:
        """``POST .../versions``: the version of a publication, the same for every rank."""
        return await self._ask(VersionAnswer, "POST", _run(run, "versions"), body=request)

    async def report_receipt(self, run: str, version: int, rank: int, report: ReceiptReport) -> VersionAnswer:
        """``PUT .../versions/{v}/receipts/{rank}``: shard and receipt are in the bucket."""
        return await self._about(run, version, "PUT", "receipts", rank, body=report)

    async def report_progress(self, run: str, version: int, rank: int, report: ProgressReport) -> VersionAnswer:
        """``PUT .../versions/{v}/progress/{rank}``: bytes of the shard moved since this was last said."""
        return await self._about(run, version, "PUT", "progress", rank, body=report)

    async def withdraw(self, run: str, version: int, rank: int, report: WithdrawalReport) -> VersionAnswer:
        """``PUT .../versions/{v}/withdrawals/{rank}``: the shard will not come, the version need not be waited for."""
        return await self._about(run, version, "PUT", "withdrawals", rank, body=report)

    # Readers

    async def runs(self) -> list[RunAnswer]:
        """``GET /v1/runs``: every run of the bucket."""
        return await self._ask(list[RunAnswer], "GET", "/v1/runs")

    async def run(self, run: str) -> RunAnswer:
        """``GET /v1/runs/{run}``."""
        return await self._ask(RunAnswer, "GET", _run(run))

    async def versions(self, run: str, *, limit: int = 50, before: int | None = None) -> list[VersionAnswer]:
        """``GET .../versions``: newest first, aborted ones included."""
        return await self._ask(list[VersionAnswer], "GET", _run(run, "versions"), {"limit": limit, "before": before})

    async def version(self, run: str, version: int, *, wait_s: float = 0) -> VersionAnswer:
        """``GET .../versions/{v}``; with ``wait_s`` (at most 60) once it is decided or the time is over."""
        return await self._about(run, version, "GET", query={"wait": wait_s}, wait_s=wait_s)

    async def manifest(self, run: str, version: int) -> bytes:
        """``GET .../versions/{v}/manifest``: byte for byte; check it against the position you hold."""
        return await self._send("GET", _run(run, "versions", version, "manifest"))

    async def head(self, run: str, *, after: int | None = None, wait_s: float = 0) -> HeadAnswer:
        """``GET .../head``; with ``after`` once the head is past it or ``wait_s`` (at most 60) is over: compare."""
        return await self._ask(HeadAnswer, "GET", _run(run, "head"), {"after": after, "wait": wait_s}, wait_s=wait_s)

    async def events(self, run: str, *, last_event_id: str = "") -> AsyncIterator[Event]:
        """``GET .../events``: iterate until the coordinator stops; then resume with the last ``Event.id``."""
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last_event_id} if last_event_id else {})}
        timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
        url = self._base + _run(run, "events")
        try:
            async with self._http.stream("GET", url, headers=headers, timeout=timeout) as response:
                if response.status_code != httpx.codes.OK:
                    raise self._problem(response.status_code, await self._bounded(response))
                self._check_plain(response)
                async for event in _events(_lines(response.aiter_bytes()), last_event_id):
                    yield event
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    # Fleet

    async def heartbeat(self, run: str, region: str, agent: str, report: AgentReport) -> AgentAnswer:
        """``PUT .../regions/{region}/agents/{id}``: what an agent has staged and serves."""
        return await self._ask(AgentAnswer, "PUT", _run(run, "regions", region, "agents", agent), body=report)

    async def regions(self, run: str) -> list[RegionAnswer]:
        """``GET .../regions``: regions with live agents or a target."""
        return await self._ask(list[RegionAnswer], "GET", _run(run, "regions"))

    async def wait(
        self,
        run: str,
        version: int,
        *,
        state: Literal["sealed", "staged", "serving"] = "serving",
        regions: Sequence[str] = (),
        quorum: float = 1.0,
        timeout_s: float = 0,
    ) -> WaitAnswer:
        """``GET .../wait``: once the share ``quorum`` of each region's agents is at ``version`` or later.

        ``timeout_s`` is at most 600; look at ``reached``. Raises ``VersionAborted`` if the version was given up.
        """
        query = {
            "version": version,
            "state": state,
            "regions": ",".join(regions),
            "quorum": quorum,
            "timeout": timeout_s,
        }
        return await self._ask(WaitAnswer, "GET", _run(run, "wait"), query, wait_s=timeout_s)

    async def health(self) -> HealthAnswer:
        """``GET /healthz``: the process is alive."""
        return await self._ask(HealthAnswer, "GET", "/healthz")

    async def ready(self) -> HealthAnswer:
        """``GET /readyz``: the coordinator reaches its store."""
        return await self._ask(HealthAnswer, "GET", "/readyz")

    # Plumbing

    async def _about(self, run: str, version: int, method: str, *parts: str | int, **more: Any) -> VersionAnswer:
        """An answer about that version of that run: one about another was altered on its way, and is no answer."""
        answer = await self._ask(VersionAnswer, method, _run(run, "versions", version, *parts), **more)
        if (answer.run, answer.version) != (run, version):
            raise CoordinatorUnreachable(
                f"{self._base} was asked about version {version} of run {run} and answered about version "
                f"{answer.version} of {answer.run}: the answer was altered or damaged on the way"
            )
        return answer

    async def _ask(
        self,
        kind: type[A],
        method: str,
        path: str,
        query: dict[str, Any] | None = None,
        *,
        body: BaseModel | None = None,
        wait_s: float = 0,
    ) -> A:
        data = await self._send(method, path, query, body=body, wait_s=wait_s)
        try:
            return TypeAdapter(kind).validate_json(data)
        except ValidationError:
            raise CoordinatorUnreachable(
                f"what answers at {self._base} is not a coordinator of this release: check the address"
            ) from None

    async def _send(
        self,
        method: str,
        path: str,
        query: dict[str, Any] | None = None,
        *,
        body: BaseModel | None = None,
        wait_s: float = 0,
    ) -> bytes:
        params = {name: value for name, value in (query or {}).items() if value is not None}
        content = body.model_dump_json().encode() if body is not None else None
        headers = {"Content-Type": "application/json"} if content is not None else None
        timeout = httpx.Timeout(self._timeout_s + wait_s, connect=_CONNECT_S)
        request = self._http.build_request(
            method, self._base + path, params=params, content=content, headers=headers, timeout=timeout
        )
        try:
            response = await self._http.send(request, stream=True)
            try:
                data = await self._bounded(response)
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code != httpx.codes.OK:
            raise self._problem(response.status_code, data)
        return data

    async def _bounded(self, response: httpx.Response) -> bytes:
        """The body, but not an endless one."""
        self._check_plain(response)
        data = bytearray()
        async for part in response.aiter_bytes():
            data += part
            if len(data) > _MAX_ANSWER_BYTES:
                raise CoordinatorUnreachable(f"the answer of {self._base} is larger than any answer may be")
        return bytes(data)

    def _check_plain(self, response: httpx.Response) -> None:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise CoordinatorUnreachable(
                f"the answer of {self._base} is compressed although that was not asked for: a proxy in between does it"
            )

    def _problem(self, status: int, data: bytes) -> CoordinatorError:
        try:
            problem = Problem.model_validate_json(data)
        except ValidationError:
            return CoordinatorUnreachable(
                f"{self._base} answered HTTP {status} without a problem body: a proxy in between, or not a coordinator"
            )
        return error_for(problem.code, problem.status, problem.detail)

    def _unreachable(self, error: httpx.HTTPError) -> CoordinatorUnreachable:
        what = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in what:
            return CoordinatorUnreachable(
                f"the TLS certificate of the coordinator at {self._base} is not trusted: name its authority in "
                f"WEIGHTCAST_CA ({what})"
            )
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return CoordinatorUnreachable(
                f"the coordinator at {self._base} does not answer: check that it runs, its address, and the network "
                f"({what})"
            )
        return CoordinatorUnreachable(f"the coordinator at {self._base} does not answer: {what}")


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Lines that end as our server ends them. ``str.splitlines`` would also cut at U+2028 and others within a text."""
    pending = b""
    async for part in parts:
        *lines, pending = (pending + part).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode("utf-8", "replace")
        if len(pending) > _MAX_EVENT_BYTES:
            raise CoordinatorUnreachable("a line of an event is larger than any event may be")


async def _events(lines: AsyncIterator[str], last_id: str) -> AsyncIterator[Event]:
    """Parse the fields that our server sends; the id of an event without one is the last id (HTML standard)."""
    name, data, size = "message", [""], 0
    data.clear()
    async for line in lines:
        size += len(line)
        if size > _MAX_EVENT_BYTES:
            raise CoordinatorUnreachable("an event is larger than any event may be")
        if line:
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                name = value
            elif field == "data":
                data.append(value)
            elif field == "id":
                last_id = value
            continue
        if data:
            yield Event(name, "\n".join(data), last_id)
        name, size = "message", 0
        data.clear()


def _run(*parts: str | int) -> str:
    return "/v1/runs/" + "/".join(quote(str(part), safe="") for part in parts)


def _checked_url(text: str) -> httpx.URL:
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError):
        raise BadRequest("the coordinator's address is not a URL: use http://host:port") from None
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise BadRequest("the coordinator's address must look like http://host:port, without user, query or fragment")
    return url
