"""Run whole runs in virtual time, each from one seed, and report the rules that they break.

A seed that fails is printed; `--seed S` runs it again exactly, tells what happened, and shrinks it
to fewer faults. Exit code 1: a rule was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from atoll.peer.lab.hunt import plans
from atoll.peer.lab.hunt.bugs import BUGS
from atoll.peer.lab.hunt.hunting import (
    Search,
    SeedResult,
    apart,
    hunt,
    shrink,
    told,
)

EXAMPLES = """examples:
  scripts/hunt --seeds 1000                         seeds 0 to 999
  scripts/hunt --minutes 480 --jobs 2 --first 50000 all night, from seed 50000 on
  scripts/hunt --seed 4711                          seed 4711 again, told and shrunk
  scripts/hunt --with skipped-fsync --seeds 2000    until the hunt finds that bug
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments ask for; by default those of the command line."""
    args = _parser().parse_args(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":
        print("hunt: set PYTHONHASHSEED=0, as scripts/hunt does: seeds repeat only so")
        return 2
    return _replay(args) if args.seed is not None else _hunt(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hunt",
        description=(__doc__ or "").splitlines()[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, help="Number of seeds (default: 100).")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="Minutes after which no further seed begins."
    )
    parser.add_argument("--first", type=int, default=0, help="First seed (default: 0).")
    parser.add_argument("--seed", type=int, help="One seed: run it, tell its story, shrink it.")
    parser.add_argument(
        "--virtual-minutes",
        type=float,
        help="Minutes of faults in a run (default: drawn from the seed, 1 to 4).",
    )
    parser.add_argument("--jobs", type=int, default=1, help="Processes (default: 1).")
    parser.add_argument(
        "--with", dest="bug", choices=BUGS, help="A bug put in by hand; ends when it is found."
    )
    parser.add_argument(
        "--no-shrink", action="store_true", help="Replay a seed without shrinking it."
    )
    parser.add_argument("--json", action="store_true", help="Print the result as JSON, last.")
    return parser


def _hunt(args: argparse.Namespace) -> int:
    search = Search(
        first=args.first,
        seeds=args.seeds or (10**9 if args.minutes else 100),
        minutes=args.minutes,
        virtual_minutes=args.virtual_minutes,
        jobs=args.jobs,
        bug=args.bug,
        until_found=args.bug is not None,
    )
    summary = hunt(search, lambda result: _tell(result, args))
    fields = summary.to_json()
    print(
        f"{summary.runs} seeds, {len(summary.found)} broke a rule; {fields['virtual_hours']} hours "
        f"in {fields['cpu_s']} s of CPU; {summary.positions} positions, {summary.epochs} epochs"
    )
    if args.json:
        print(json.dumps(fields))
    return 1 if summary.found else 0


def _tell(result: SeedResult, args: argparse.Namespace) -> None:
    if result.rule:
        minutes = f" --virtual-minutes {args.virtual_minutes:g}" if args.virtual_minutes else ""
        bug = f" --with {args.bug}" if args.bug else ""
        print(f"seed {result.seed}: {result.text[:400]}")
        print(f"  again: scripts/hunt --seed {result.seed}{minutes}{bug}")
        print(f"  its story, before it shrinks: {result.story}", flush=True)


def _replay(args: argparse.Namespace) -> int:
    plan = plans.draw(args.seed, minutes=args.virtual_minutes)
    run = whole = apart(told, plan, args.bug)  # in a child, as each seed of a range
    num_tried = 0
    if whole.rule and not args.no_shrink:
        plan, num_tried = shrink(plan, whole.rule, bug=args.bug)
        run = apart(told, plan, args.bug)
    print("\n".join(run.lines))
    if run.cause:
        print(run.cause, end="")
    print(f"\nseed {args.seed}: {run.text or 'no rule was broken'}")
    print(f"its story{', before it shrank' if num_tried else ''}: {whole.story}")
    if num_tried:
        print(f"shrunk to {len(plan.faults)} faults in {num_tried} runs")
    if args.json:
        fields = {
            "seed": args.seed,
            "rule": run.rule or None,
            "text": run.text or None,
            "faults": [str(fault) for fault in plan.faults],
            "virtual_s": round(run.virtual_s, 2),
            "story": whole.story,
        }
        print(json.dumps(fields))
    return 1 if run.rule else 0


if __name__ == "__main__":
    sys.exit(main())
