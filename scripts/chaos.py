#!/usr/bin/env python3
"""Let real processes in a lab of networks train under faults, and measure what that costs.

    ./scripts/chaos                           10 minutes, 8 peers, a fault every 30 s; needs root
    ./scripts/chaos --minutes 30 --peers 8    as in docs/benchmarks/chaos.md
    ./scripts/chaos --seed 7 --plan           print the faults of a seed, and run nothing
    ./scripts/chaos --save                    also write docs/benchmarks/chaos.md and .json
    ./scripts/chaos --json                    the result as JSON on the last line

A coordinator with a public address and the peers, half of them behind routers, are processes on
hosts of `WanLab`. The run goes on without faults for the time given, and then again from nothing
with faults: the first one's tokens per second of a living peer are what the living could do. A peer
lives from when it says that it trains until it is killed, or told to leave, without the time for
which it is stopped. Exits with 1 if a target is missed, and with 2 if nothing can be measured.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_allreduce import lab_is_possible
from bench_nat import progress
from chaos_plan import KINDS, WORDS, Fault, draw
from chaos_run import Seen, finish, lab_of
from chaos_score import living_s, tokens_between
from circumstances import circumstances
from pipeline_learning import loss_at
from rows import put_between

ROOT = Path(__file__).resolve().parent.parent
SAVED = ROOT / "docs" / "benchmarks" / "chaos.json"
PAGE = ROOT / "docs" / "benchmarks" / "chaos.md"
MARKS = ("<!-- rows of chaos.json -->", "<!-- end of rows -->")
# docs/benchmarks/chaos.md states what each of these is about.
KEPT, LOSS, GROWTH = 0.98, 1.02, 0.05
TOLD_EVERY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """Two runs, compared."""

    minutes: float
    peers: int
    seed: int
    faults: dict[str, int]
    """by kind"""
    kept: float
    """tokens per second of a living peer, as a share of those without faults"""
    tokens: float
    tokens_per_living_s: float
    calm_tokens_per_living_s: float
    living: float
    """share of the peers' time for which they lived"""
    rounds: int
    calm_rounds: int
    at_tokens: float
    """up to which both came"""
    loss: float
    """held out, there"""
    calm_loss: float
    growth: float
    """of the resident memory of the process that grew most, in both runs"""
    grew: str
    """that process"""
    chains: int
    """most different chains at one position"""
    in_the_end: int
    """peers that train at the end"""
    left_behind: list[str]
    """processes and files"""

    @property
    def missed(self) -> list[str]:
        """The targets that this missed."""
        checks: list[tuple[bool, str]] = [
            (self.kept < KEPT, f"kept {self.kept:.1%} of the tokens"),
            (self.loss > LOSS * self.calm_loss, f"loss {self.loss / self.calm_loss:.3f} of calm"),
            (self.growth > GROWTH, f"{self.grew} grew by {self.growth:.0%}"),
            (self.chains != 1, f"{self.chains} different chains"),
            (self.in_the_end != self.peers, f"{self.in_the_end} peers at the end"),
            (bool(self.left_behind), f"left behind: {'; '.join(self.left_behind)}"),
        ]
        return [text for is_missed, text in checks if is_missed]


def run(minutes: float, peers: int, faults: list[Fault]) -> Seen:
    """Run once from nothing, with these faults."""
    with lab_of(peers) as case:
        case.begin()
        progress(f"{peers} peers train")
        began_s = told_s = time.time()
        for text in case.run_until(began_s + 60 * minutes, faults):
            if text or time.time() - told_s > TOLD_EVERY_S:
                told_s = time.time()
                passed = (told_s - began_s) / 60
                progress(f"{passed:.1f} of {minutes:g} minutes, round {case.position()}: {text}")
        return finish(case, (began_s, began_s + 60 * minutes))


def result_of(options: argparse.Namespace, faults: list[Fault], calm: Seen, struck: Seen) -> Result:
    """Compare a run with faults with one without."""
    rates = [tokens_between(each.points, each.within) / living(each) for each in (calm, struck)]
    at_tokens = min(calm.losses[-1][0], struck.losses[-1][0])
    grown = [(m.growth, m.name) for m in (*calm.memories, *struck.memories) if m.growth is not None]
    growth, grew = max(grown, default=(0.0, ""))
    counts = Counter(fault.kind for fault in faults)
    return Result(
        minutes=options.minutes,
        peers=options.peers,
        seed=options.seed,
        faults={kind: counts[kind] for kind in KINDS if counts[kind]},
        kept=rates[1] / rates[0],
        tokens=tokens_between(struck.points, struck.within),
        tokens_per_living_s=rates[1],
        calm_tokens_per_living_s=rates[0],
        living=living(struck) / (options.peers * 60 * options.minutes),
        rounds=struck.rounds,
        calm_rounds=calm.rounds,
        at_tokens=at_tokens,
        loss=loss_at(struck.losses, at_tokens),
        calm_loss=loss_at(calm.losses, at_tokens),
        growth=growth,
        grew=grew,
        chains=max(calm.chains, struck.chains),
        in_the_end=min(calm.in_the_end, struck.in_the_end),
        left_behind=[*calm.left_behind, *struck.left_behind],
    )


def living(seen: Seen) -> float:
    """Return the seconds for which the peers of a run lived."""
    return living_s(seen.lives, seen.within)


def table(result: dict[str, Any]) -> str:
    """Return a result as a table."""
    faults = ", ".join(f"{kind} {number}" for kind, number in result["faults"].items())
    ratio = result["loss"] / result["calm_loss"]
    growth = f"{result['grew']}: {result['growth']:+.1%}" if result["grew"] else "(too short)"
    rows = [
        ("peers, minutes, seed", f"{result['peers']}, {result['minutes']:g}, {result['seed']}"),
        ("faults", f"{sum(result['faults'].values())}: {faults}"),
        ("tokens kept of what the living could train", f"{result['kept']:.1%}"),
        ("the peers' time for which they lived", f"{result['living']:.1%}"),
        ("rounds, and without faults", f"{result['rounds']}, {result['calm_rounds']}"),
        (
            f"held-out loss after {result['at_tokens']:,.0f} tokens, and without faults",
            f"{result['loss']:.4f}, {result['calm_loss']:.4f}: {ratio - 1:+.1%}",
        ),
        ("memory that grew most", growth),
        ("different chains at one position", result["chains"]),
        ("peers that train at the end", result["in_the_end"]),
        ("processes and files left behind", len(result["left_behind"])),
        ("measured", f"{result['date']}, {result['commit']}, {result['machine']}"),
    ]
    lines = [f"| {name} | {value} |" for name, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines])


def save(result: dict[str, Any]) -> None:
    """Write a result into the benchmark's files."""
    SAVED.write_text(json.dumps(result, indent=1) + "\n")
    put_between(PAGE, MARKS, table(result))


def number(least: float, kind: Callable[[str], float] = float) -> Callable[[str], float]:
    """Return a type of argument: a number of at least so much."""

    def parse(text: str) -> float:
        value = kind(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least:g}, got {text}")
        return value

    return parse


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    kinds = "\n".join(f"    {kind:12} {WORDS[kind]}" for kind in KINDS)
    result = argparse.ArgumentParser(
        prog="chaos",
        description=__doc__,
        epilog=f"faults:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "--minutes", type=number(1), default=10.0, metavar="M", help="of each run (default: 10)"
    )
    result.add_argument("--peers", type=number(3, int), default=8, metavar="N", help="(default: 8)")
    result.add_argument(
        "--every", type=number(5), default=30.0, metavar="S", help="seconds a fault (default: 30)"
    )
    result.add_argument("--seed", type=int, default=0, help="of the faults (default: 0)")
    result.add_argument("--plan", action="store_true", help="print the faults and exit")
    result.add_argument("--save", action="store_true", help="save the result in docs/benchmarks")
    result.add_argument("--json", action="store_true", help="print the result as JSON, last")
    return result


def main() -> int:
    """Do what the arguments ask for."""
    options = parser().parse_args()
    faults = draw(
        options.seed, seconds=60 * options.minutes, peers=options.peers, every_s=options.every
    )
    if options.plan:
        for fault in faults:
            print(f"{fault.at_s:7.1f} s  {fault}")
        return 0
    if problem := lab_is_possible():
        print(f"chaos: {problem}; run it as root on Linux", file=sys.stderr)
        return 2
    calm = run(options.minutes, options.peers, [])
    struck = run(options.minutes, options.peers, faults)
    result = result_of(options, faults, calm, struck)
    fields = asdict(result) | circumstances()
    print(table(fields))
    for text in result.missed:
        print(f"missed: {text}")
    if options.save:
        save(fields)
    if options.json:
        print(json.dumps(fields))
    return 1 if result.missed else 0


if __name__ == "__main__":
    sys.exit(main())
