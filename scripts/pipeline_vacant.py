"""The time without a stage whose peers all died, for `bench_pipeline.py`."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench_nat import events, wait_until
from pipeline_lab import Flowing, Pipeline, link_of, rounds, running

WAIT_S = 150.0
ROUNDS_FIRST = 1  # of each stage, before any peer dies
# Windows of 25 s: the stage has a log to recover, and its next round is soon.
VACATED = Pipeline(
    forward_s=(0.06,) * 3,
    factors=(1.0,) * 6,
    microbatches=32,
    staleness=2,
    inner_steps=3,
    windows="deadline",
)


@dataclass(frozen=True, kw_only=True)
class Vacant:
    """How long a stage was without a microbatch, in seconds since its last peer was killed."""

    stage: int
    """from 1 on"""
    named_s: float
    """until a peer of another stage set out"""
    ready_s: float
    """until it trained there: it left, joined, recovered the log and tested itself"""
    counted_s: float
    """until it reported a microbatch that it has counted"""
    round_s: float
    """until the stage's next round was in its log"""
    joined_again: int
    """peers of the stage by then"""


def vacant() -> Iterator[Vacant]:
    """Kill both peers of each stage in turn, each time in a new run."""
    for stage in range(VACATED.stages):
        with running(VACATED, link_of(25.0, 50.0), in_turn=True) as case:
            yield vacated(case, stage)


def vacated(case: Flowing, stage: int) -> Vacant:
    """Kill the peers of a stage, and watch until it has held a round again."""
    module = f"stage-{stage + 1}"
    hosts = range(stage + 1, case.pipeline.peers + 1, case.pipeline.stages)
    wait_until(lambda: min(rounds(list(case.looks()))) >= ROUNDS_FIRST, WAIT_S, case.words)
    at_s, before = time.time(), rounds(list(case.looks()))[stage]
    for host in hosts:
        case.kill(host)
    dead = {f"peer-{host}" for host in hosts}
    wait_until(lambda: has_moved_on(list(case.looks()), module, dead, before), WAIT_S, case.words)
    others = [name for name in case.children if name.startswith("peer-") and name not in dead]
    logs = [events(case.folder / f"{name}.log") for name in others]
    return vacancy(list(case.looks()), logs, stage, dead, at_s, before)


def has_moved_on(looks: Sequence[dict[str, Any]], module: str, dead: set[str], before: int) -> bool:
    """Return whether peers other than the dead have brought a stage beyond a position."""
    return bool(arrivals(looks, module, dead, above=before))


def arrivals(
    looks: Sequence[dict[str, Any]], module: str, dead: set[str], *, above: int = -1
) -> list[tuple[float, dict[str, Any]]]:
    """Return reports of peers that came to a stage and have counted something, with their times."""
    return [
        (peer["heard_at"], peer)
        for look in looks
        for peer in look["peers"]
        if peer["module"] == module
        and peer["name"] not in dead
        and peer["position"] > above
        and (peer["flow"] or {}).get("counted")
    ]


def vacancy(
    looks: Sequence[dict[str, Any]],
    logs: Sequence[Sequence[dict[str, Any]]],
    stage: int,
    dead: set[str],
    at_s: float,
    before: int,
) -> Vacant:
    """Return what looks and logs show of a stage that lost its peers.

    Args:
        looks: all of them, until the stage has held a round again.
        logs: the events of each peer that lived.
        stage: from 0 on.
        dead: names of the peers that were killed.
        at_s: when the last of them was.
        before: the position of the stage's log by then.
    """
    module = f"stage-{stage + 1}"
    mover = next(log for log in logs if set_out_s(log, module, at_s) is not None)
    named_s = set_out_s(mover, module, at_s)
    assert named_s is not None
    ready_s = min(each["time"] for each in mover if is_ready(each) and each["time"] > named_s)
    counted, held = (arrivals(looks, module, dead, above=n) for n in (-1, before))
    return Vacant(
        stage=stage + 1,
        named_s=named_s - at_s,
        ready_s=ready_s - at_s,
        counted_s=counted[0][0] - at_s,
        round_s=held[0][0] - at_s,
        joined_again=len({peer["name"] for _, peer in counted}),
    )


def set_out_s(log: Sequence[dict[str, Any]], module: str, from_s: float) -> float | None:
    """Return when a peer said that it moves to a stage, if it did after some time."""
    moves = (
        each["time"]
        for each in log
        if each.get("code") == "stage.moves" and each["fields"]["to_module"] == module
    )
    return next((time_s for time_s in moves if time_s > from_s), None)


def is_ready(event: dict[str, Any]) -> bool:
    """Return whether a peer said that it trains."""
    return bool(event["kind"] == "ready")


def vacant_table(found: Sequence[dict[str, Any]]) -> str:
    """Return the stages that were vacant as Markdown."""
    lines = [
        "| vacant | a peer sets out after | trains there | next microbatch | next round | peers "
        "| date, commit |",
        "|---" * 7 + "|",
    ]
    for row in found:
        lines.append(
            f"| stage {row['stage']} | {row['named_s']:.1f} s | {row['ready_s']:.1f} s "
            f"| {row['counted_s']:.1f} s | {row['round_s']:.1f} s | {row['joined_again']} "
            f"| {row['date']}, {row['commit']} |"
        )
    return "\n".join(lines)
