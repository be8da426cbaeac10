"""Targets: tokens and credentials, object keys and store URLs, and what an S3 server answers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from botocore.parsers import create_parser
from botocore.session import get_session

from coordinator import access, tokens
from coordinator.credentials import Credentials
from coordinator.errors import CoordinatorError, TokenFileRefused
from tests.fuzz.record_targets import OBJECTS
from tests.fuzz.reshaping import reshape_json, within
from tests.fuzz.target import Target, require
from weight_store.errors import FormatError, StoreError, StoreRefused
from weight_store.keys import (
    asset_key,
    control_key,
    head_key,
    layout_key,
    manifest_key,
    offer_key,
    open_key,
    parse_key,
    receipt_key,
    run_marker_key,
    shard_key,
)
from weight_store.object_keys import check_key_prefix, check_object_key
from weight_store.opening import parse_s3_url
from weight_store.s3_errors import Place, translated
from weight_store.s3_settings import check_endpoint

# Tokens, keys, addresses


def _token_file(data: bytes) -> None:
    try:
        known = tokens.parse_lines(data, "the file")
    except TokenFileRefused as error:
        require(len(str(error)) < 300, "the sentence repeats the file")
        return
    again = b"".join(stored.model_dump_json().encode() + b"\n" for stored in known.values())
    require(tokens.parse_lines(again, "the file") == known, "the lines change when they are written again")
    token = data.decode("latin-1")
    require(tokens.verify(token, known) is None, "the file itself is a token")


def _fixed(i: int, n: int) -> bytes:
    return bytes([i]) * n


def _token_seeds() -> Iterator[bytes]:
    lines = [tokens.issue([one], "who", random_bytes=partial(_fixed, i)) for i, one in enumerate(access.Scope)]
    yield b"# tokens\n\n" + b"".join(one.stored.model_dump_json().encode() + b"\n" for one in lines)


def _one_line(data: bytes) -> bytes:
    return next(line for line in data.split(b"\n") if line.startswith(b"{"))


def _with_line(data: bytes, line: bytes) -> bytes:
    return data.replace(_one_line(data), line, 1)


_secret = tempfile.NamedTemporaryFile(prefix="weightcast-fuzz-")  # noqa: SIM115 - until the process ends


def _credentials(data: bytes) -> None:
    path = Path(_secret.name)
    path.write_bytes(data)
    for credentials in (Credentials(token_file=path), Credentials(ca=path)):
        try:
            credentials.auth()
            credentials.verify()
        except CoordinatorError as error:
            require(data[:40] not in str(error).encode() or len(data) < 40, "an error repeats the token")


def _keys(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    for check in (check_object_key, check_key_prefix, parse_s3_url, check_endpoint):
        try:
            check(text)  # type: ignore[operator]
        except StoreRefused as error:
            str(error).encode()  # a sentence that cannot be printed helps nobody
    try:
        found = parse_key(text)
    except FormatError as error:
        str(error).encode()
        return
    run, version, rank = found.run, found.version or 0, found.rank or 0
    built = {
        "run": lambda: run_marker_key(run),
        "head": lambda: head_key(run),
        "control": lambda: control_key(run),
        "layout": lambda: layout_key(run, found.sha256),
        "asset": lambda: asset_key(run, found.sha256),
        "offer": lambda: offer_key(run, found.term or 0, rank),
        "open": lambda: open_key(run, version),
        "manifest": lambda: manifest_key(run, version),
        "shard": lambda: shard_key(run, version, rank, found.nonce, extra_full=found.extra_full),
        "receipt": lambda: receipt_key(run, version, rank, extra_full=found.extra_full),
    }[found.kind]()
    require(built == text, "a key that is parsed and built again is another")
    require(check_object_key(text) == text, "a key of ours is no object key")


# What an S3 server answers


@cache
def _shapes() -> tuple[Any, tuple[Any, ...]]:
    model = get_session().get_service_model("s3")
    names = ("GetObject", "PutObject", "ListObjectsV2", "ListMultipartUploads", "CreateMultipartUpload")
    return create_parser("rest-xml"), tuple(model.operation_model(name).output_shape for name in names)


def _s3_answer(data: bytes) -> None:
    """First line: a status; then an XML body. Whatever botocore makes of it, or trips over, our table must know."""
    from botocore.exceptions import ClientError

    head, body = _parts(data)
    status = int(head[0]) if head[0].isdigit() and len(head[0]) == 3 else 500
    parser, shapes = _shapes()
    for shape in shapes:
        try:
            with translated(Place("bucket", "http://store"), "a/key"):
                answer = parser.parse({"status_code": status, "headers": {}, "body": body}, shape)
                if status >= 300:
                    raise ClientError(answer, "GetObject")
        except StoreError as error:
            require(len(str(error)) < 1000, "the server's text is repeated at length")


def _s3_seeds() -> Iterator[bytes]:
    for code in ("NoSuchKey", "SlowDown", "AccessDenied", "PreconditionFailed", "Unheard"):
        yield (
            f"404\n\n<?xml version='1.0'?><Error><Code>{code}</Code><Message>m</Message><Key>k</Key></Error>".encode()
        )
    yield b"503\n\n"
    found = "<Key>a</Key><Size>1</Size><ETag>e</ETag><LastModified>2026-01-01T00:00:00Z</LastModified>"
    yield f"200\n\n<ListBucketResult><Contents>{found}</Contents></ListBucketResult>".encode()


def _parts(data: bytes) -> tuple[list[bytes], bytes]:
    """The lines before the first empty one, and what follows it."""
    head, _, body = data.partition(b"\n\n")
    return head.split(b"\n"), body


def _targets() -> Iterator[Target]:
    yield Target(
        "token-file", _token_file, _token_seeds, within(_one_line, reshape_json, _with_line), covers=("parse_lines",)
    )
    yield Target(
        "credentials",
        _credentials,
        lambda: [b"wct_00000000000a_" + b"A" * 43 + b"\n", b"-----BEGIN CERTIFICATE-----\n"],
        covers=("Credentials",),
        ci_runs=500,
    )
    yield Target(
        "keys",
        _keys,
        lambda: [
            *(key.encode() for key in OBJECTS),
            b"_runs/demo",
            b"s3://bucket/a/b?endpoint=http://h:9000&region=eu",
        ],
        None,
        (
            b"s3://",
            b"?endpoint=",
            b"&region=",
            b"%2F",
            b"%00",
            b"/full/",
            b".shard",
            b"/../",
            b"http://",
            b"@",
            b"[::1]",
        ),
        covers=("parse_key", "check_object_key", "parse_s3_url", "check_endpoint"),
        max_bytes=1200,
        ci_runs=2500,
    )
    yield Target(
        "s3-answer",
        _s3_answer,
        _s3_seeds,
        None,
        (b"<Error>", b"<Code>", b"</Code>", b"<!ENTITY "),
        covers=("classify",),
    )


TARGETS = tuple(_targets())
