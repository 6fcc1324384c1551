#!/usr/bin/env python3
"""Measure what attackers cost a run: rounds per minute, memory, and the time until they are out.

    ./scripts/bench attacks                    all attacks, one row each (some minutes)
    ./scripts/bench attacks --only p1,p3
    ./scripts/bench attacks --save             also write docs/benchmarks/attacks.md and .json
    ./scripts/bench attacks --seeds 2000       only liars at random, from so many seeds
    ./scripts/bench attacks --json             the rows as JSON on the last line

The peers are those of `tests/support/swarm.py`: real rounds, log and votes on an in-memory network
and a virtual clock. Four peers train in windows of 5 s; the last is the attacker, or a stranger
beside them. The attackers are those of `tests/attacks`. Each row has a process of its own.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import pytest  # noqa: E402
import torch  # noqa: E402

from support import attackers  # noqa: E402
from support.liar_runs import BOUND_S, PATIENCE_S, WINDOW_S, LiarRun, run_liar  # noqa: E402
from support.liars import Liar  # noqa: E402
from support.swarm import SMALL, Swarm, SwarmPeer, identity_of, run_swarm  # noqa: E402

SAVED = ROOT / "docs" / "benchmarks" / "attacks.json"
PAGE = ROOT / "docs" / "benchmarks" / "attacks.md"
MARKS = ("<!-- rows of attacks.json -->", "<!-- end of rows -->")
PHASE_S = 180.0  # 36 windows: each of four peers leads nine positions
STEP_S = 0.25  # between two looks at the peers
MIB = 1 << 20

Begin = Callable[[pytest.MonkeyPatch, list[SwarmPeer]], Awaitable[None] | None]
"""Starts an attack by the last of the peers; a coroutine runs until the attack ends."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One attack."""

    attack: str
    what: str
    before: float
    """rounds per minute"""
    during: float
    after: float
    longest_s: float
    """between two rounds during the attack"""
    memory_mb: float
    """growth of the peak memory of the process that has all peers, from before the attack"""
    out_s: float | None
    """until all honest peers barred the attacker for good, or it lost its vote; None: never"""


def _deny(patch: pytest.MonkeyPatch, peers: list[SwarmPeer]) -> None:
    attackers.deny_others(patch, peers[-1].ctx.me)


def _alone(patch: pytest.MonkeyPatch, peers: list[SwarmPeer]) -> None:
    attackers.drop(patch, peers[-1].ctx.me, 3)
    attackers.close_alone(patch, peers[-1].ctx.me)


def _stop_at(step: str) -> Begin:
    return lambda patch, peers: attackers.stop_at(patch, peers[-1].ctx.me, step)


def _equivocate(patch: pytest.MonkeyPatch, peers: list[SwarmPeer]) -> None:
    attackers.equivocate(patch, peers[-1].ctx.me)


def _falsify(patch: pytest.MonkeyPatch, peers: list[SwarmPeer]) -> None:
    attackers.falsify(patch, peers[-1].ctx.me, {"weight": 999999995904.0})


async def _far_terms(patch: pytest.MonkeyPatch, peers: list[SwarmPeer]) -> None:
    identity = identity_of(99)
    stranger = peers[0].swarm.network.transport(identity.peer_id)
    await attackers.call_far_terms(stranger, identity, peers, set())


ATTACKS: dict[str, tuple[str, Begin | None]] = {
    "none": ("no attack", None),
    "p1": ("an owner reports that nobody else sent anything", _deny),
    "p2": ("a leader drops all other electors", _alone),
    "p3": ("a leader never closes the group", _stop_at("_form")),
    "p3-vote": ("a leader never counts the votes", _stop_at("_count_votes")),
    "p4": ("a leader proposes two entries at one ballot", _equivocate),
    "p7": ("a leader gives a member an absurd weight", _falsify),
    "p13": ("a stranger reports for the last term", _far_terms),
    "random": ("an elector lies at random (seed 2)", None),
}
"""by name; the liar at random takes over its peer before the run starts"""


def _peak_mb() -> float:
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib * 1024 / MIB if sys.platform != "darwin" else kib / MIB


class _Watch:
    """Rounds of the honest peers on the virtual clock."""

    def __init__(self, swarm: Swarm, honest: Sequence[SwarmPeer], attacker: SwarmPeer) -> None:
        self.swarm, self.honest, self.attacker = swarm, honest, attacker
        self.longest_s = 0.0
        self.out_at: float | None = None

    def least(self) -> int:
        return min(peer.replica.position for peer in self.honest)

    def is_out(self) -> bool:
        name = self.attacker.identity.peer_id
        barred = all(peer.ctx.conduct.is_out(name) for peer in self.honest)
        return barred or all(
            name not in {e.peer_id for e in peer.replica.electorate} for peer in self.honest
        )

    async def rate(self) -> float:
        """Return the rounds per minute of a phase."""
        began_s, first = self.swarm.now(), self.least()
        at, since_s, self.longest_s = first, began_s, 0.0
        while (now_s := self.swarm.now()) < began_s + PHASE_S:
            self.longest_s = max(self.longest_s, now_s - since_s)
            if self.least() > at:
                at, since_s = self.least(), now_s
            if self.out_at is None and self.is_out():
                self.out_at = now_s
            for peer in self.swarm.peers:  # what tests look up later, and no real peer keeps
                peer.handed_in.clear()
                peer.offers.clear()
                peer.settled.clear()
            await asyncio.sleep(STEP_S)
        return 60 * (at - first) / (self.swarm.now() - began_s)


def measure(attack: str) -> Row:
    """Run one attack, from a time without it to a time after it."""
    torch.set_num_threads(1)
    what, begin = ATTACKS[attack]

    async def scenario(swarm: Swarm) -> Row:
        peers = [swarm.add(window_s=WINDOW_S) for _ in range(4)]
        honest = peers if attack in ("none", "p13") else peers[:-1]
        liar = Liar(peers[-1], honest, 2) if attack == "random" else None
        await swarm.begin(peers)
        watch = _Watch(swarm, honest, peers[-1])
        await swarm.until(lambda: watch.least() >= 2)
        before = await watch.rate()
        peak_mb, began_s = _peak_mb(), swarm.now()
        with pytest.MonkeyPatch.context() as patch:
            work = begin(patch, peers) if begin is not None else None
            tasks = liar.begin() if liar is not None else []
            if work is not None:
                tasks.append(asyncio.ensure_future(work))
            during = await watch.rate()
            longest_s, memory_mb = watch.longest_s, _peak_mb() - peak_mb
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if liar is not None:
                liar.lying = False
        return Row(
            attack=attack,
            what=what,
            before=before,
            during=during,
            after=await watch.rate(),
            longest_s=longest_s,
            memory_mb=memory_mb,
            out_s=None if watch.out_at is None else watch.out_at - began_s,
        )

    with tempfile.TemporaryDirectory() as folder:
        return run_swarm(Path(folder), scenario, codec="int8", layout=SMALL)


def run_seed(seed: int, trust: Any) -> LiarRun:
    """Run one liar at random in a mode of trust."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        told = run_liar(Path(folder), seed, trust)
    gc.collect()  # a swarm is a cycle of tensors, whose bytes the collector does not see
    return told


def run_seeds(first: int, count: int) -> dict[str, Any]:
    """Run seeds in both modes, half of them in each; print those that fail."""
    told = []
    for seed in range(first, first + count):
        run = run_seed(seed, "byzantine" if seed % 2 else "crash")
        told.append(run)
        for fault in run.faults:
            print(f"seed {seed} ({run.trust}): {fault}", flush=True)
    longest = max(told, key=lambda run: run.longest_s)
    found = {
        "first_seed": first,
        "seeds": count,
        "failed": [run.seed for run in told if run.faults],
        "lies": sum(run.lies for run in told),
        "positions": sum(run.positions for run in told),
        "longest_s": longest.longest_s,
        "longest_seed": longest.seed,
        "bound_s": BOUND_S,
        "most_tasks": max(run.most_tasks for run in told),
        "out": sum(run.out_after_s is not None for run in told),
    }
    print(
        f"{count} seeds, {len(found['failed'])} failed: {found['lies']} lies, {found['positions']} "
        f"positions, the longest {found['longest_s']:.0f} s (bound {BOUND_S:.0f} s), at most "
        f"{found['most_tasks']} tasks; {found['out']} liars barred for good"
    )
    return found


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| attack | | before | during | after | longest round, s | memory, MB | out after, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        out = "n/a" if row.out_s is None else f"{row.out_s:.0f}"
        lines.append(
            f"| {row.attack} | {row.what} | {row.before:.1f} | {row.during:.1f} | {row.after:.1f} "
            f"| {row.longest_s:.1f} | {row.memory_mb:.0f} | {out} |"
        )
    return "\n".join(lines)


def report(rows: Sequence[Row], seeds: dict[str, Any] | None) -> dict[str, Any]:
    """Return what --json prints."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit.strip(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "window_s": WINDOW_S,
        "phase_s": PHASE_S,
        "deadline_s": PATIENCE_S,
        "rows": [asdict(row) for row in rows],
        "seeds": seeds,
    }


def save(found: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write the report, and the table between the marks of the page."""
    known = json.loads(SAVED.read_text()) if SAVED.exists() else {}
    merged = found | {
        "rows": found["rows"] or known.get("rows", []),
        "seeds": found["seeds"] or known.get("seeds"),
    }
    SAVED.write_text(json.dumps(merged, indent=1) + "\n")
    if rows:
        before, rest = PAGE.read_text().split(MARKS[0])
        _, after = rest.split(MARKS[1])
        head = f"{found['date']}, commit {found['commit']}, {found['machine']}."
        PAGE.write_text(f"{before}{MARKS[0]}\n\n{head}\n\n{table(rows)}\n\n{MARKS[1]}{after}")


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", default="", help=f"comma-separated (default all), of: {', '.join(ATTACKS)}")
    add("--seeds", type=int, default=0, help="number of random liars to run instead (default 0)")
    add("--first-seed", type=int, default=0, help="first seed of them (default 0)")
    add("--save", action="store_true", help=f"save the rows in {SAVED.name} and {PAGE.name}")
    add("--json", action="store_true", help="print the rows as JSON on the last line")
    options = parser.parse_args()
    options.only = options.only.split(",") if options.only else list(ATTACKS)
    if unknown := set(options.only) - set(ATTACKS):
        parser.error(f"no attack {', '.join(sorted(unknown))}; choose from {', '.join(ATTACKS)}")
    return options


def main() -> int:
    """Run what is asked for; return 1 if a seed failed."""
    options = arguments()
    rows, seeds = [], None
    if options.seeds:
        seeds = run_seeds(options.first_seed, options.seeds)
    else:
        fresh = multiprocessing.get_context("spawn")  # peak memory is a number of the process
        with ProcessPoolExecutor(1, mp_context=fresh, max_tasks_per_child=1) as pool:
            rows = list(pool.map(measure, options.only))
        print(table(rows))
    found = report(rows, seeds)
    if options.save:
        save(found, rows)
    if options.json:
        print(json.dumps(found))
    return 1 if seeds and seeds["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
