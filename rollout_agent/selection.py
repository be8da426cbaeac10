"""Which tensors and groups a replica keeps. Pure.

Patterns name tensors: a shell pattern (``model.layers.[0-3].*``; ``*`` also crosses dots) or, after ``re:``, a regular
expression that must match the whole name. A group cannot be decoded in part, so every tensor that shares a group with a
selected one is selected too; a pattern that follows layer boundaries selects exactly what it names, unless layers are
so small that they share groups (less than 16 MiB for each rank, see :mod:`weight_store.grouping`).
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from rollout_agent.errors import NothingSelected
from weight_store.layout import Group, Layout


def compile_patterns(patterns: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    """An expression for each of ``patterns``; ``NothingSelected`` names one that is not a regular expression.

    Not one for all: flags, names and numbers of groups are each expression's own.
    """
    found: list[re.Pattern[str]] = []
    for pattern in patterns:
        source = pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern)
        try:
            found.append(re.compile(source))
        except (re.error, OverflowError, RecursionError) as error:
            raise NothingSelected(f"the pattern {pattern!r} is not a regular expression: {error}") from None
    return tuple(found)


def _matches(name: str, expressions: Sequence[re.Pattern[str]]) -> bool:
    return any(expression.fullmatch(name) for expression in expressions)


def select(layouts: Sequence[Layout], patterns: Sequence[str]) -> frozenset[str]:
    """Names of the tensors to keep: all without patterns, else the matching ones and those that share their groups.

    A tied name selects the tensor it is tied to. ``layouts``: every layout on the way, so that the selection is closed
    under all of them. Raises ``NothingSelected``.
    """
    names = {name for layout in layouts for name in layout.names}
    if not patterns:
        return frozenset(names)
    expressions = compile_patterns(patterns)
    chosen = {name for name in names if _matches(name, expressions)}
    for layout in layouts:
        chosen |= {target for alias, target in layout.aliases.items() if _matches(alias, expressions)}
    if not chosen:
        example = min(names, default="")
        raise NothingSelected(
            f"no tensor matches {', '.join(map(repr, patterns))}; names look like {example!r}, "
            "patterns are shell patterns or 're:' and a regular expression"
        )
    return _close(layouts, chosen)


def _close(layouts: Sequence[Layout], chosen: set[str]) -> frozenset[str]:
    """``chosen`` and whatever shares groups with it, directly or through others. Looks at each group once."""
    groups = [{piece.tensor.name for piece in group.pieces} for layout in layouts for group in layout.groups]
    groups_of: defaultdict[str, list[int]] = defaultdict(list)
    for number, members in enumerate(groups):
        for name in members:
            groups_of[name].append(number)
    closed, todo = set(chosen), list(chosen)
    while todo:
        for number in groups_of.pop(todo.pop(), ()):
            joined, groups[number] = groups[number] - closed, set()
            closed |= joined
            todo += joined
    return frozenset(closed)


def wanted_groups(layout: Layout, selected: Collection[str]) -> tuple[Group, ...]:
    """Groups that hold a piece of a selected tensor, in order."""
    return tuple(g for g in layout.groups if any(piece.tensor.name in selected for piece in g.pieces))


def is_closed(groups: Iterable[Group], selected: Collection[str]) -> bool:
    """Whether ``groups`` hold pieces of selected tensors only."""
    return all(piece.tensor.name in selected for group in groups for piece in group.pieces)
