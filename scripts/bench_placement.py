#!/usr/bin/env python3
"""Playback churn under policies of placement, and compare them with the best assignment.

    ./scripts/bench placement                      the saved table
    ./scripts/bench placement --rerun --save       replay (minutes) and save
    ./scripts/bench placement --rerun --setting small --seeds 3
    ./scripts/bench placement --rerun --trace FILE --stages 1,1,1.3      a recorded trace (CSV)
    ./scripts/bench placement --json               the result as JSON on the last line

`peer/lab/churn_trace.py` describes traces, the replay and the upper bound that stands for the best
assignment. All policies get the same traces and the same meter, and newcomers go to the lowest
stage under each of them. Exit code 1: a target was missed.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from circumstances import circumstances
from rows import put_between

from atoll.peer.lab.churn_trace import (
    Churn,
    Newcomers,
    Playback,
    Score,
    Ticked,
    Visit,
    Watched,
    most_to_least,
    of_the_whole,
    read_trace,
    synthetic,
)
from atoll.peer.pipeline.placement import StageNeeds

ROOT = Path(__file__).resolve().parent.parent
SAVED = ROOT / "docs" / "benchmarks" / "placement.json"
PAGE = ROOT / "docs" / "benchmarks" / "placement.md"
MARKS = ("<!-- rows of placement.json -->", "<!-- end of rows -->")
SEEDS = 10
TARGET_SHARE = 0.97  # of the optimum, by the production policy at T = 300 s
STATE_BYTES = 2_000_000_000  # 250M parameters and as much outer memory, in fp32
# The first stage also embeds, and the last has the head and the loss.
THREE_STAGES, FOUR_STAGES = (1.1, 1.0, 1.3), (1.1, 1.0, 1.0, 1.3)

Policy = Callable[[Sequence[Visit], tuple[StageNeeds, ...], int], Playback]


def ticked(period_s: float, newcomers: Newcomers = "lowest") -> Policy:
    return lambda visits, stages, seed: Ticked(
        visits, stages, rule=most_to_least, period_s=period_s, seed=seed, newcomers=newcomers
    )


def production(period_s: float, newcomers: Newcomers = "lowest") -> Policy:
    return lambda visits, stages, seed: Watched(
        visits, stages, period_s=period_s, seed=seed, newcomers=newcomers
    )


def whole_run(visits: Sequence[Visit], stages: tuple[StageNeeds, ...], seed: int) -> Playback:
    return Watched(visits, stages, period_s=300.0, seed=seed, rule=of_the_whole)


PRODUCTION = "Atoll, T = 300 s"
OURS = (PRODUCTION, "Atoll, T = 60 s", "Atoll, T = 300 s, newcomers anywhere")
POLICIES: dict[str, Policy] = {
    "no moves, newcomers anywhere": ticked(math.inf, "anywhere"),
    "SWARM's rule, T = 300 s, newcomers anywhere": ticked(300.0, "anywhere"),
    "SWARM's rule, T = 60 s, newcomers anywhere": ticked(60.0, "anywhere"),
    "Atoll, T = 300 s, newcomers anywhere": production(300.0, "anywhere"),
    "no moves": ticked(math.inf),
    "SWARM's rule, T = 300 s": ticked(300.0),
    "SWARM's rule, T = 60 s": ticked(60.0),
    "25% of the run, T = 300 s": whole_run,
    PRODUCTION: production(300.0),
    "Atoll, T = 60 s": production(60.0),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A kind of run."""

    costs: tuple[float, ...]
    state_bytes: int
    churn: Churn
    has_target: bool


SETTINGS = {
    # Equal peers and stages, and moves of 20 s. SWARM's own rule then has about the shares of its
    # paper: the number of peers and their life were chosen for that.
    "as SWARM's": Setting(
        costs=(1.0, 1.0, 1.0),
        state_bytes=0,
        churn=Churn(peers=80, fastest=1.0, lifetime_h=2.0),
        has_target=True,
    ),
    "large": Setting(
        costs=THREE_STAGES, state_bytes=STATE_BYTES, churn=Churn(peers=240), has_target=True
    ),
    # No newcomers: peers go until some 20 are left.
    "ebbing": Setting(
        costs=THREE_STAGES,
        state_bytes=STATE_BYTES,
        churn=Churn(peers=240, lifetime_h=24.0, replaced=0.0),
        has_target=True,
    ),
    # Without a target: not even instant and free moves, one after another, reach 97%.
    "small": Setting(
        costs=FOUR_STAGES, state_bytes=STATE_BYTES, churn=Churn(peers=24), has_target=False
    ),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A policy in a setting, over all seeds."""

    setting: str
    policy: str
    seeds: int
    share: float
    """Of the optimum: samples of all seeds."""
    lowest: float
    highest: float
    """The seeds' extremes."""
    moves_per_peer_day: float
    fills: float
    """Moves to vacant stages, per seed."""
    stopped_min: float
    """Minutes with a vacant stage, per seed."""
    at_once: int
    """Moves that began while another peer was moving, all seeds."""
    emptied: int
    """Moves that took a stage's last peer, all seeds."""
    looks_per_peer_h: float


@dataclass(frozen=True, kw_only=True)
class Task:
    """One replay."""

    setting: str
    policy: str
    seed: int
    trace: Path | None = None
    costs: tuple[float, ...]
    state_bytes: int


def replay(task: Task) -> tuple[Task, Score]:
    """Play one trace under one policy."""
    visits = (
        read_trace(task.trace) if task.trace else synthetic(SETTINGS[task.setting].churn, task.seed)
    )
    stages = tuple(
        StageNeeds(cost=cost, state_bytes=task.state_bytes, device_bytes=0) for cost in task.costs
    )
    return task, POLICIES[task.policy](visits, stages, task.seed).run()


def measure(tasks: Sequence[Task]) -> list[Row]:
    """Play all, one on each core, and sum them up."""
    found: dict[tuple[str, str], list[Score]] = {}
    began_s = time.monotonic()
    with multiprocessing.get_context("spawn").Pool() as pool:
        for done, (task, outcome) in enumerate(pool.imap_unordered(replay, tasks), 1):
            found.setdefault((task.setting, task.policy), []).append(outcome)
            took_s = time.monotonic() - began_s
            print(
                f"{done} of {len(tasks)}, {took_s:.0f} s: {task.setting}, {task.policy}, seed "
                f"{task.seed}: {outcome.share:.2%}",
                file=sys.stderr,
                flush=True,
            )
    in_order = dict.fromkeys((task.setting, task.policy) for task in tasks)
    return [summed(*key, found[key]) for key in in_order]


def summed(setting: str, policy: str, outcomes: Sequence[Score]) -> Row:
    """Return the row of a policy's replays."""
    peer_s = sum(outcome.peer_s for outcome in outcomes)
    shares = [outcome.share for outcome in outcomes]
    return Row(
        setting=setting,
        policy=policy,
        seeds=len(outcomes),
        share=sum(o.samples for o in outcomes) / sum(o.optimal_samples for o in outcomes),
        lowest=min(shares),
        highest=max(shares),
        moves_per_peer_day=86400 * sum(outcome.moves for outcome in outcomes) / peer_s,
        fills=statistics.mean(outcome.fills for outcome in outcomes),
        stopped_min=statistics.mean(outcome.stopped_s for outcome in outcomes) / 60,
        at_once=sum(outcome.at_once for outcome in outcomes),
        emptied=sum(outcome.emptied for outcome in outcomes),
        looks_per_peer_h=3600 * sum(outcome.looks for outcome in outcomes) / peer_s,
    )


def missed(rows: Sequence[Row]) -> list[str]:
    """Return the targets that were missed, as sentences."""
    found = []
    for row in rows:
        has_target = row.setting not in SETTINGS or SETTINGS[row.setting].has_target
        if has_target and row.policy == PRODUCTION and row.share < TARGET_SHARE:
            found.append(
                f"{row.setting}: {row.policy} reached {row.share:.1%} of the optimum; the target "
                f"is {TARGET_SHARE:.0%}"
            )
        if row.policy in OURS and row.emptied:
            found.append(f"{row.setting}: {row.emptied} moves of {row.policy} emptied a stage")
    return found


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| run | policy | of the optimum | seeds, lowest to highest | moves per peer and day "
        "| fills | stopped, min | moves at once | looks per peer and hour |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.setting} | {row.policy} | {row.share:.1%} | {row.lowest:.1%} to {row.highest:.1%} "
        f"| {row.moves_per_peer_day:.2f} | {row.fills:.1f} | {row.stopped_min:.1f} "
        f"| {row.at_once} | {row.looks_per_peer_h:.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def report(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what --json prints."""
    return {
        **circumstances(),
        "target_share": TARGET_SHARE,
        "settings": {name: asdict(setting) for name, setting in SETTINGS.items()},
        "rows": [asdict(row) for row in rows],
    }


def save(found: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write the report, and the table between the marks of the page."""
    SAVED.write_text(json.dumps(found, indent=1) + "\n")
    head = f"{found['date']}, commit {found['commit']}; {rows[0].seeds} seeds, 32 h each."
    put_between(PAGE, MARKS, f"{head}\n\n{table(rows)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--setting", choices=SETTINGS, help="the only setting to replay (default: all)")
    add("--seeds", type=int, default=SEEDS, help="traces per row (default %(default)s)")
    add("--trace", type=Path, help="CSV file of a recorded trace, in place of synthetic ones")
    add("--stages", default="1,1,1", help="costs of that run's stages (default %(default)s)")
    add("--rerun", action="store_true", help="replay again")
    add("--save", action="store_true", help=f"save the rows in {SAVED.name} and {PAGE.name}")
    add("--json", action="store_true", help="print the result as JSON on the last line")
    options = parser.parse_args()
    if options.save and (options.trace or options.setting or options.seeds != SEEDS):
        parser.error(f"--save is for all settings and {SEEDS} seeds")
    return options


def tasks_of(options: argparse.Namespace) -> list[Task]:
    """Return the replays that the options ask for."""
    if options.trace:
        costs = tuple(float(cost) for cost in options.stages.split(","))
        name = options.trace.name
        return [
            Task(
                setting=name,
                policy=policy,
                seed=seed,
                trace=options.trace,
                costs=costs,
                state_bytes=STATE_BYTES,
            )
            for policy in POLICIES
            for seed in range(options.seeds)
        ]
    return [
        Task(
            setting=name,
            policy=policy,
            seed=seed,
            costs=setting.costs,
            state_bytes=setting.state_bytes,
        )
        for name, setting in SETTINGS.items()
        if options.setting in (None, name)
        for policy in POLICIES
        if setting.churn.replaced or not policy.endswith("newcomers anywhere")
        for seed in range(options.seeds)
    ]


def main() -> int:
    options = arguments()
    if options.rerun or options.trace or not SAVED.exists():
        rows = measure(tasks_of(options))
        found = report(rows)
    else:
        found = json.loads(SAVED.read_text())
        rows = [Row(**row) for row in found["rows"]]
    if options.save:
        save(found, rows)
    print(table(rows))
    for sentence in missed(rows):
        print(f"bench placement: {sentence}", file=sys.stderr)
    if options.json:
        print(json.dumps(found))
    return 1 if missed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
