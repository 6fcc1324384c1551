#!/usr/bin/env python3
"""Measure what faults cost a round between hosts, in seconds: atoll, hivemind and gloo.

    ./scripts/bench faults                          the saved table
    ./scripts/bench faults --rerun --save           measure again (half an hour) and save
    ./scripts/bench faults --faults "member killed,member frozen" --systems atoll --repeat 1
    ./scripts/bench faults --json                   the rows as JSON on the last line

Every host has its own processes (`faults_host.py`) in a network namespace of `WanLab`, which
needs root. A fault strikes in the middle of a reduction. Time runs from the fault until the last
survivor has the result: for atoll the entry with its certificate, for the others the return of
their call, whatever is in the vector. `late` is how much later that was than in an undisturbed
round.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from bench_allreduce import lab_is_possible, load
from circumstances import commit, machine, today
from faults_cases import Strike
from faults_lab import SceneError
from faults_table import ALIKE, HOSTS, Case, cases
from rows import put_between

ROOT = Path(__file__).resolve().parent.parent
SAVED = ROOT / "docs" / "benchmarks" / "faults.json"
PAGE = ROOT / "docs" / "benchmarks" / "faults.md"
MARKS = ("<!-- rows of faults.json -->", "<!-- end of rows -->")
SYSTEMS = ("atoll", "hivemind", "gloo")
TRIES = 2  # attempts at a scene in which the hosts do not start reducing


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault, with all its repeats."""

    system: str
    fault: str
    seconds: float | None
    """median, from the fault to the last survivor's result; None if there was none"""
    all_seconds: list[float]
    late_s: float | None
    """median, relative to an undisturbed round"""
    back_s: float | None
    """median, from the end of the fault until the struck host is counted again"""
    target_s: float | None
    outcome: str
    date: str
    commit: str
    load: str


def run(case: Case, system: str, options: argparse.Namespace, log: IO[bytes]) -> Row:
    """Run all repeats of a case."""
    strikes = []
    for _ in range(options.repeat if system == "atoll" else 1):
        strikes.append(one(case, system, options, log))
        print(f"{system}, {case.fault}: {strikes[-1]}", file=sys.stderr, flush=True)
    return row_of(case, system, strikes)


def one(case: Case, system: str, options: argparse.Namespace, log: IO[bytes]) -> Strike:
    """Strike once; try again if the hosts did not even reduce undisturbed."""
    params, why = case.params or options.params, ""
    ours = system == "atoll"
    kind, measure = (case.scene, case.ours) if ours else (case.rival_scene, case.rivals)
    for _ in range(TRIES):
        try:
            with kind(system, case.links, params, log, nice=options.nice) as scene:
                return measure(scene)
        except SceneError as error:
            why = str(error)
    return Strike(seconds=None, outcome=why)


def row_of(case: Case, system: str, strikes: Sequence[Strike]) -> Row:
    seconds = [s.seconds for s in strikes if s.seconds is not None]
    worst = max(strikes, key=lambda s: float("inf") if s.seconds is None else s.seconds)
    return Row(
        system=system,
        fault=case.fault,
        seconds=middle(seconds),
        all_seconds=[round(s, 2) for s in seconds],
        late_s=middle([s.late_s for s in strikes if s.late_s is not None]),
        back_s=middle([s.back_s for s in strikes if s.back_s is not None]),
        target_s=case.target_s if system == "atoll" else None,
        outcome=worst.outcome,
        date=today(),
        commit=commit(),
        load=load(),
    )


def middle(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 2) if values else None


def table(rows: Sequence[Row]) -> str:
    """Format the rows as Markdown, grouped by fault."""
    order = [case.fault for case in cases()]
    lines = [
        "| fault | system | to the survivors' result, s | each | later than undisturbed, s "
        "| counted again after, s | outcome | commit, load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(rows, key=lambda r: (order.index(r.fault), SYSTEMS.index(r.system))):
        each = " ".join(f"{s:.1f}" for s in r.all_seconds)
        lines.append(
            f"| {r.fault} | {r.system} | {number(r.seconds)} | {each} | {number(r.late_s)} "
            f"| {number(r.back_s)} | {r.outcome} | {r.commit}, {r.load.split()[0]} |"
        )
    return "\n".join(lines)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def known() -> list[Row]:
    """Return the saved rows."""
    return [Row(**row) for row in json.loads(SAVED.read_text())["rows"]] if SAVED.exists() else []


def save(new: Sequence[Row], params: int) -> list[Row]:
    """Save new rows, keeping those of other faults and systems; return all."""
    names = {(row.fault, row.system) for row in new}
    rows = [*(row for row in known() if (row.fault, row.system) not in names), *new]
    SAVED.write_text(json.dumps(report(rows, params), indent=1) + "\n")
    put_between(PAGE, MARKS, table(rows))
    return rows


def report(rows: Sequence[Row], params: int) -> dict[str, Any]:
    """Return what --json prints."""
    return {
        "machine": machine(),
        "hosts": HOSTS,
        "links": [asdict(link) for link in ALIKE],
        "params": params,
        "codec": "int8",
        "rows": [asdict(row) for row in rows],
    }


def measure(options: argparse.Namespace) -> list[Row]:
    """Strike."""
    wanted = options.faults.split(",") if options.faults else []
    rows = []
    options.log.parent.mkdir(exist_ok=True)
    with options.log.open("wb") as log:
        for case in [case for case in cases() if not wanted or case.fault in wanted]:
            for system in options.systems.split(","):
                if system == "atoll" or (case.rivals and system not in case.not_for):
                    rows.append(run(case, system, options, log))
    return rows


def arguments() -> argparse.Namespace:
    names = ", ".join(case.fault for case in cases())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--faults", default="", help=f"comma-separated (default all), of: {names}")
    add(
        "--systems",
        default=",".join(SYSTEMS),
        help="comma-separated systems to strike (default %(default)s)",
    )
    add(
        "--repeat",
        type=int,
        default=3,
        help="repeats for atoll (default 3); the others are struck once",
    )
    add(
        "--params",
        type=int,
        default=10_000_000,
        help="number of values to reduce (default %(default)s)",
    )
    add("--nice", type=int, default=0, help="niceness of the hosts; -20: before other programs")
    add(
        "--log",
        type=Path,
        default=ROOT / "build" / "bench_faults.log",
        help="log of the hosts (default build/bench_faults.log)",
    )
    add("--rerun", action="store_true", help="measure again")
    add("--save", action="store_true", help=f"save the rows in {SAVED.name} and {PAGE.name}")
    add("--json", action="store_true", help="print the rows as JSON on the last line")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if known() and len(sys.argv) <= 1 + options.json:
        rows = known()
    elif why := lab_is_possible():
        print(f"bench: cannot start the hosts: {why}", file=sys.stderr)
        return 2
    else:
        rows = measure(options)
    if options.save:
        rows = save(rows, options.params)
    print(table(rows))
    if options.json:
        print(json.dumps(report(rows, options.params)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
