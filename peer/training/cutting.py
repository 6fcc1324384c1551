"""Cut a model's slices into stages: evenly, or by patterns over the names of its parameters.

A stage has consecutive slices, and the stages follow each other as the slices do. Patterns are
those of a shell (`*`, `?`, `[1-4]`) over global names (`slices.3.attention.qkv.weight`), in which
`*` also stands for dots: `slices.3.*` is a whole slice, and `slices.[1-4].*` are four.
"""

import fnmatch
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from atoll.coordinator.run.spec import stage_name
from atoll.peer.errors import ModelError


def cut_evenly(costs: Sequence[int], stages: int) -> tuple[range, ...]:
    """Cut a sequence into consecutive runs whose largest cost is the least possible.

    Of the cuts with that largest cost, it is one with the least sum of squares, so that the other
    runs are about equal too. Costs are whole numbers, so that all machines find the same cut.

    Args:
        costs: of each slice, at least 0.
        stages: number of runs.

    Raises:
        ModelError: there are fewer slices than stages, or no stage.
    """
    if not 1 <= stages <= len(costs):
        raise ModelError(
            f"expected 1 to {len(costs)} stages, as many as the model has slices (each block is "
            f"one, and so are what comes before them and after them), got {stages}; change stages "
            "in [topology] or the number of blocks"
        )
    starts = [0, *itertools.accumulate(costs)]
    largest = _least_largest(costs, stages)
    # For each number of slices, the least sum of squares of its runs, and where the last begins.
    best: list[tuple[int, int] | None] = [(0, 0), *[None] * len(costs)]
    begins: list[list[int]] = []
    for _ in range(stages):
        best = [_extended(best, starts, stop, largest) for stop in range(len(starts))]
        begins.append([0 if found is None else found[1] for found in best])
    runs, stop = [], len(costs)
    for row in reversed(begins):
        runs.append(range(row[stop], stop))
        stop = row[stop]
    return tuple(reversed(runs))


def cut_by_patterns(
    names: Sequence[Sequence[str]], stages: Sequence[Sequence[str]]
) -> tuple[range, ...]:
    """Cut the slices of a model as patterns say; each parameter must be in exactly one stage.

    Args:
        names: of the parameters of each slice, in order.
        stages: the patterns of each stage.

    Raises:
        ModelError: a parameter is in no stage or in two, a pattern matches none, or the stages
            divide a slice or change the order of the slices.
    """
    patterns = [
        _Pattern(stage=stage, text=text) for stage, each in enumerate(stages) for text in each
    ]
    stage_of = [_stage_of_slice(index, each, patterns) for index, each in enumerate(names)]
    flat = [name for each in names for name in each]
    for pattern in patterns:
        if not any(map(pattern.matches, flat)):
            raise ModelError(
                f"topology.stages: {pattern} matches no parameter; the model's names are "
                f"{flat[0]} to {flat[-1]}; correct the pattern, or remove it"
            )
    for index, (before, here) in enumerate(itertools.pairwise(stage_of), start=1):
        if here < before:
            raise ModelError(
                f"topology.stages: {names[index][0]} is in {stage_name(here)}, behind a slice of "
                f"{stage_name(before)}; stages follow each other as the slices do, so put slice "
                f"{index} into {stage_name(before)} or a later stage"
            )
    begins = [stage_of.index(stage) for stage in range(len(stages))]
    return tuple(itertools.starmap(range, itertools.pairwise((*begins, len(names)))))


@dataclass(frozen=True, kw_only=True)
class _Pattern:
    """A pattern of a stage."""

    stage: int
    text: str

    def matches(self, name: str) -> bool:
        """Return whether a parameter has such a name."""
        return self._compiled.match(name) is not None

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(fnmatch.translate(self.text))

    def __str__(self) -> str:
        return f"{self.text!r} of {stage_name(self.stage)}"


def _stage_of_slice(index: int, names: Sequence[str], patterns: Sequence[_Pattern]) -> int:
    """Return the stage that has all parameters of a slice."""
    first, *others = names
    stage = _stage_of(first, patterns)
    for name in others:
        other = _stage_of(name, patterns)
        if other != stage:
            raise ModelError(
                f"topology.stages: {first} is in {stage_name(stage)} and {name} in "
                f"{stage_name(other)}, and a slice cannot be divided; put 'slices.{index}.*' into "
                "one of them"
            )
    return stage


def _stage_of(name: str, patterns: Sequence[_Pattern]) -> int:
    """Return the only stage that has a parameter."""
    found = {each.stage: each for each in patterns if each.matches(name)}
    if not found:
        raise ModelError(
            f"topology.stages: no pattern matches {name}; add it to those of a stage, for example "
            f"as '{'.'.join(name.split('.')[:2])}.*'"
        )
    if len(found) > 1:
        one, other, *_ = found.values()
        raise ModelError(
            f"topology.stages: both {one} and {other} match {name}, and a parameter is in one "
            "stage; narrow one of them"
        )
    return next(iter(found))


def _extended(
    best: Sequence[tuple[int, int] | None], starts: Sequence[int], stop: int, largest: int
) -> tuple[int, int] | None:
    """Return the best way to end one run more at `stop`; None if it would cost too much."""
    found: tuple[int, int] | None = None
    for start in range(stop - 1, -1, -1):
        cost = starts[stop] - starts[start]
        if cost > largest:
            break
        before = best[start]
        if before is not None and (found is None or before[0] + cost**2 < found[0]):
            found = before[0] + cost**2, start
    return found


def _least_largest(costs: Sequence[int], stages: int) -> int:
    """Return the least cost such that that many runs, none of which costs more, hold all slices."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _runs_within(costs, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _runs_within(costs: Sequence[int], largest: int) -> int:
    """Return how few runs hold all slices if none costs more than `largest`."""
    runs, filled = 1, 0
    for cost in costs:
        if filled + cost > largest:
            runs, filled = runs + 1, 0
        filled += cost
    return runs
