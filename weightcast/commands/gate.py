"""``weightcast gate``: run a command while the model directory is whole and cannot change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click

from rollout_agent.commandline import without_token
from rollout_agent.errors import EngineRefused
from rollout_agent.gate import held
from weightcast.commands._seconds import Seconds

_POLL_S = 0.05


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--model-dir", required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--timeout", "timeout_s", type=Seconds(min=0), help="Seconds to wait for a whole version; for ever by default."
)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Hold the directory only until the command has made this file: when it has loaded the weights. One that is "
    "there before is removed.",
)
@click.option(
    "--verify/--no-verify",
    default=True,
    show_default=True,
    help="Hash the weights before, which also finds what rotted by itself; without it only files that were touched.",
)
@click.argument("argv", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    model_dir: Path, timeout_s: float | None, ready_file: Path | None, verify: bool, argv: tuple[str, ...]
) -> None:
    """Run a command while the model directory is whole and cannot change.

    Waits until an agent has brought the directory to a whole version, holds it there while COMMAND runs (or until it
    has made --ready-file), and ends with the command's exit status. Files that are not what they should be are not
    loaded: the command waits until the agent has repaired them. WEIGHTCAST_VERSION, WEIGHTCAST_STEP and
    WEIGHTCAST_RUN tell the command what it loads; WEIGHTCAST_TOKEN and WEIGHTCAST_TOKEN_FILE are kept from it. If the
    gate is killed the directory is held until the command ends.

    No version is stored while the directory is held: an engine that goes on running needs --ready-file.
    """
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)
    with held(model_dir, timeout_s=timeout_s, verify=verify) as (whole, lock):
        environment = without_token(os.environ) | {
            "WEIGHTCAST_RUN": whole.run,
            "WEIGHTCAST_VERSION": str(whole.position.version),
            "WEIGHTCAST_STEP": str(whole.step),
        }
        try:
            # The command inherits the lock: should this process be killed, it goes on loading all the same.
            inherited = () if lock.descriptor is None else (lock.descriptor,)
            process = subprocess.Popen(argv, env=environment, pass_fds=inherited)  # noqa: S603 - the user's own
        except OSError as error:
            raise EngineRefused(f"{argv[0]} could not be started: {error.strerror}") from None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, _: process.send_signal(received))
        while process.poll() is None and not (ready_file is not None and ready_file.exists()):
            time.sleep(_POLL_S)
    status = process.wait()
    sys.exit(status if status >= 0 else 128 - status)
