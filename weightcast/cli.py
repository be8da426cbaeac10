"""The ``weightcast`` command. Each subcommand lives in its own module and is imported only when it runs."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

import click

_COMMANDS = {
    "bench": "Measure the codec on your own data, beside its peers.",
    "codec": "Tell what your own checkpoints would cost as deltas.",
    "coordinator": "Run the service that seals versions and announces them.",
    "demo": "Run the whole path on this machine and prove it bit-exact.",
    "doctor": "Try out a store and say what is safe on it.",
    "gate": "Run a command while the model directory is whole and cannot change.",
    "gc": "Delete old versions and the remains of failed ones.",
    "inspect": "Show a run, a version, a shard or a model directory.",
    "publish": "Publish a Hugging Face checkpoint directory as one version.",
    "rollout": "Keep a model directory on the policy of a run.",
    "status": "Ask the coordinator how far versions and regions are.",
    "token": "Make and list the tokens that a coordinator admits.",
    "trainer": "Watch a directory and publish each checkpoint that appears.",
    "verify": "Check a model directory or a version of the bucket against its digests.",
}
"""Name -> one line of help. The module is ``weightcast.commands.<name>`` and defines ``command``."""

_EXPECTED_ERRORS = (
    ("codec.errors", "CodecError"),
    ("weight_store.errors", "WeightStoreError"),
    ("coordinator.errors", "CoordinatorError"),
    ("trainer_agent.errors", "TrainerError"),
    ("rollout_agent.errors", "RolloutError"),
    ("weightcast.devserver", "DevServerError"),
    ("weightcast.demo.errors", "DemoError"),
    ("weightcast.measure.errors", "MeasureError"),
)


@contextlib.contextmanager
def _plain_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process at once: within an import of native modules Python would make other errors of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        with _plain_ctrl_c():
            command: click.Command = importlib.import_module(f"weightcast.commands.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="weightcast")
def cli() -> None:
    """Keep RL rollout fleets bit-exactly on the policy that a trainer has just produced."""


def main() -> None:
    """Run the command line. An expected error is one sentence on stderr and exit status 1, never a traceback.

    What the operating system refuses (a missing directory, a full disk, a permission) is expected, wherever it is met.
    """
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.UsageError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        click.echo(f"weightcast: {error.format_message()}", err=True)
        sys.exit(error.exit_code)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except BrokenPipeError:
        # Whoever read our output, as in `| head`, has seen enough; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        click.echo(f"weightcast: {_refusal(error)}", err=True)
        sys.exit(1)
    except Exception as error:
        if not _expected(error):
            raise
        click.echo(f"weightcast: {error}", err=True)
        sys.exit(1)


def _refusal(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename else reason


def _expected(error: Exception) -> bool:
    """True for the errors of our packages; only packages that were imported can have raised one."""
    modules = ((sys.modules.get(module), name) for module, name in _EXPECTED_ERRORS)
    return any(module is not None and isinstance(error, getattr(module, name)) for module, name in modules)
