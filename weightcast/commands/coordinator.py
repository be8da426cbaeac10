"""``weightcast coordinator``: run the service that seals versions and announces them."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from coordinator.ambient import Settings
from coordinator.server import ServerOptions, run
from weightcast.commands._options import store_option
from weightcast.commands._seconds import Seconds


@click.command()
@store_option()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; others must be asked for.")
@click.option("--port", default=8470, show_default=True, type=click.IntRange(0, 65535), help="0 picks a free port.")
@click.option(
    "--expire-after",
    "expire_after_s",
    default=120.0,
    show_default=True,
    type=Seconds(min=0, min_open=True),
    help="Seconds without a sign of life (a receipt, bytes that move) after which a version is given up.",
)
@click.option(
    "--poll",
    "poll_s",
    default=1.0,
    show_default=True,
    type=Seconds(min=0.01),
    help="Seconds between looks at the bucket for what other coordinators did.",
)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the address here once requests are answered; removed at the end.",
)
@click.option(
    "--token-file",
    envvar="WEIGHTCAST_TOKENS",
    show_envvar=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Hashes of the tokens to admit, from 'weightcast token new'; may be left out on loopback only.",
)
@click.option("--tls-cert", type=click.Path(dir_okay=False, path_type=Path), help="Certificate and its chain (PEM).")
@click.option("--tls-key", type=click.Path(dir_okay=False, path_type=Path), help="Its private key (PEM).")
@click.option(
    "--max-connections",
    default=20_000,
    show_default=True,
    type=click.IntRange(min=1),
    help="More are answered with HTTP 503; each agent holds one or two.",
)
@click.option(
    "--single-writer",
    is_flag=True,
    help="Start on a store without sound conditional writes: nothing else may write to it. See 'weightcast doctor'.",
)
@click.option("--access-log", is_flag=True, help="Log every request.")
@click.option("--verbose", is_flag=True, help="Log, too, whatever is asked of the store again because it failed.")
def command(
    store_url: str,
    host: str,
    port: int,
    expire_after_s: float,
    poll_s: float,
    ready_file: Path | None,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    max_connections: int,
    single_writer: bool,
    access_log: bool,
    verbose: bool,
) -> None:
    """Run the service that seals versions and announces them.

    Prints "listening on http://HOST:PORT" once it answers; logs go to stderr. Stop it with Ctrl-C or SIGTERM. Any
    number of coordinators may serve one bucket, so it first makes sure that the store keeps them apart; while the store
    does not answer, requests get HTTP 503. Credentials come from the AWS environment, never from the URL.

    On any address but this machine's own it takes --token-file: requests then need a token with the right scope. The
    file is read again when it changes.
    """
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    for chatty in ("botocore", "aiobotocore", "urllib3", "uvicorn.error", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    settings = Settings(expire_after_s=expire_after_s, poll_s=poll_s)
    options = ServerOptions(
        store_url,
        host,
        port,
        settings,
        ready_file,
        access_log,
        token_file=token_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        max_connections=max_connections,
        single_writer=single_writer,
    )
    run(options, lambda url: click.echo(f"listening on {url}"))
