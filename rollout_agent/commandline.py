"""A command that no shell runs: its words, what in it only a shell would understand, its environment. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path

from rollout_agent.errors import EngineRefused

_TOKENS = frozenset({"WEIGHTCAST_TOKEN", "WEIGHTCAST_TOKEN_FILE"})
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "ash"})
_IN_QUOTES = re.compile(r"\$\(|`")
_OUTSIDE = re.compile(r"&&|\|\||[;|<>`]|\$\(|(?<!\S)&(?!\S)")
_PLACEHOLDER = re.compile(r"(?<![${])\{(\w+)\}(?!\})")
"""Not a shell's ``${name}``, nor the ``{{name}}`` of other programs' templates."""


def split_command(command: str, placeholders: Collection[str]) -> list[str]:
    """The words of ``command``, split as a shell would. ``EngineRefused`` for none, for what needs a shell, and for a
    placeholder ``{name}`` that is none of ``placeholders``.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise EngineRefused(f"the command {command!r} cannot be split into words: {error}") from None
    if not words:
        raise EngineRefused("the command for new versions is empty")
    operator = _operator(command, shell=any(Path(word).name in _SHELLS for word in words))
    if operator is not None:
        raise EngineRefused(
            f"the command for new versions has {operator} in it, which only a shell understands, and none runs it: "
            f"write sh -c '…' around it, or '{operator}' in single quotes if it is a plain argument"
        )
    unknown = next((name for name in _PLACEHOLDER.findall(command) if name not in placeholders), None)
    if unknown is not None:
        known = ", ".join(f"{{{name}}}" for name in placeholders)
        raise EngineRefused(
            f"the command for new versions has {{{unknown}}} in it, and only {known} are filled in: correct it, or "
            f"write {{ {unknown} }} if it is no placeholder"
        )
    return words


def without_token(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` less what holds or names a token: what programs of others that we start have no use for."""
    return {name: value for name, value in environment.items() if name not in _TOKENS}


def _operator(command: str, *, shell: bool) -> str | None:
    """The first operator of a shell that no quotes take the meaning from; what is in double quotes is ``shell``'s."""
    at, quoted = 0, False
    while at < len(command):
        if command[at] == '"':
            at, quoted = at + 1, not quoted
        elif command[at] == "\\":
            at += 2
        elif command[at] == "'" and not quoted:
            at = command.index("'", at + 1) + 1
        elif quoted and shell:
            at += 1
        elif found := (_IN_QUOTES if quoted else _OUTSIDE).match(command, at):
            return found[0]
        else:
            at += 1
    return None
