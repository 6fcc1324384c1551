#!/usr/bin/env python3
"""Measure what attackers cost a run: rounds per minute, memory, and the time until they are out.

Without `--real`, attacks on rounds strike four peers in memory on a virtual clock, one row each,
and attacks that are refused before they reach a round are tried once. With `--real`, the attacks
strike a coordinator and four peers as processes on loopback. Each attack has a process of its own.
The attackers are those of `tests/attacks`; docs/security.md names the defences.
"""

import argparse
import gc
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import attacks_doors
import attacks_real
import attacks_rows
import attacks_swarm
import torch
from circumstances import circumstances

from support.liar_runs import BOUND_S, PATIENCE_S, WINDOW_S, LiarRun, run_liar

ROOT = Path(__file__).resolve().parent.parent
SAVED = ROOT / "docs" / "benchmarks" / "attacks.json"
PAGE = ROOT / "docs" / "benchmarks" / "attacks.md"
SEEDS_A_LINE = 50  # of progress, about a minute
EXAMPLES = """\
examples:
  ./scripts/bench attacks                       all attacks in memory (5 minutes)
  ./scripts/bench attacks --only p1,p3,o1
  ./scripts/bench attacks --real                with real processes (20 minutes)
  ./scripts/bench attacks --only p3,d1 --real
  ./scripts/bench attacks --save                also write docs/benchmarks/attacks.md and .json
  ./scripts/bench attacks --seeds 2000          only liars at random, from so many seeds
  ./scripts/bench attacks --json                the rows as JSON on the last line
"""

Section = dict[str, Any]


def run_each(
    kind: str, run: Callable[[str], Any], names: Sequence[str], missed: Callable[[Any], list[str]]
) -> list[Any]:
    """Run each attack in a fresh process: peak memory is a number of the process."""
    rows, fresh = [], multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh, max_tasks_per_child=1) as pool:
        for name in names:
            began_s = time.monotonic()
            row = pool.submit(run, name).result()
            rows.append(row)
            verdict = "; ".join(missed(row)) or "all targets met"
            took_s = time.monotonic() - began_s
            print(f"{kind} {name}: {verdict} ({took_s:.0f} s)", file=sys.stderr, flush=True)
    return rows


def run_seed(seed: int) -> LiarRun:
    """Run one liar at random, with `trust = "byzantine"` for odd seeds."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        told = run_liar(Path(folder), seed, "byzantine" if seed % 2 else "crash")
    gc.collect()  # a swarm is a cycle of tensors, whose bytes the collector does not see
    return told


def run_seeds(first: int, count: int) -> Section:
    """Run seeds in both modes, one on each core; print those that fail."""
    told = []
    with multiprocessing.get_context("spawn").Pool() as pool:
        for run in pool.imap(run_seed, range(first, first + count)):
            told.append(run)
            for fault in run.faults:
                print(f"seed {run.seed} ({run.trust}): {fault}", flush=True)
            if len(told) % SEEDS_A_LINE == 0:
                print(f"{len(told)} of {count} seeds", file=sys.stderr, flush=True)
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


def section(rows: Sequence[Any], **settings: float) -> Section:
    """Return rows with the conditions under which they were measured."""
    return {
        **circumstances(),
        **settings,
        "rows": [asdict(row) for row in rows],
    }


def measure(only: Sequence[str], *, real: bool) -> dict[str, Section]:
    """Run attacks; return their sections of the report."""
    missed = attacks_rows.missed
    if real:
        rows = run_each("real", attacks_real.measure, only, missed)
        settings = {"phase_s": attacks_real.PHASE_S, "deadline_s": attacks_real.DEADLINE_S}
        return {"real": section(rows, **settings)}
    found = {}
    if names := [name for name in only if name in attacks_swarm.ATTACKS]:
        rows = run_each("in memory", attacks_swarm.measure, names, missed)
        settings = {"window_s": WINDOW_S, "phase_s": attacks_swarm.PHASE_S}
        found["memory"] = section(rows, **settings, deadline_s=PATIENCE_S)
    if names := [name for name in only if name in attacks_doors.DOORS]:
        doors = run_each("refused", attacks_doors.attempt, names, attacks_doors.missed)
        found["doors"] = section(doors)
    return found


def table(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of a section as Markdown."""
    if name == "doors":
        return attacks_doors.table([attacks_doors.Door(**row) for row in rows])
    return attacks_rows.table([attacks_rows.Row(**row) for row in rows])


def merged(known: Section | None, found: Section) -> Section:
    """Return a section with what was known of attacks that did not run again."""
    rows = {row["attack"]: row for row in (known or {}).get("rows", [])}
    rows |= {row["attack"]: row for row in found["rows"]}
    order = [*attacks_swarm.ATTACKS, *attacks_real.ATTACKS, *attacks_doors.DOORS]
    return found | {"rows": sorted(rows.values(), key=lambda row: order.index(row["attack"]))}


def save(found: dict[str, Section]) -> None:
    """Write the report, and each table between its marks of the page."""
    saved = json.loads(SAVED.read_text()) if SAVED.exists() else {}
    page = PAGE.read_text()
    for name, part in found.items():
        saved[name] = part if name == "seeds" else merged(saved.get(name), part)
        if name == "seeds":
            continue
        marks = (f"<!-- {name} of attacks.json -->", f"<!-- end of {name} -->")
        before, rest = page.split(marks[0])
        _, after = rest.split(marks[1])
        head = f"{part['date']}, commit {part['commit']}, {part['machine']}."
        rows = table(name, saved[name]["rows"])
        page = f"{before}{marks[0]}\n\n{head}\n\n{rows}\n\n{marks[1]}{after}"
    SAVED.write_text(json.dumps(saved, indent=1) + "\n")
    PAGE.write_text(page)


def arguments() -> argparse.Namespace:
    """Return the options."""
    in_memory = [*attacks_swarm.ATTACKS, *attacks_doors.DOORS]
    names = f"in memory: {', '.join(in_memory)}\nreal: {', '.join(attacks_real.ATTACKS)}"
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"attacks {names}\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", default="", metavar="NAMES", help="attacks, separated by commas (default all)")
    add("--real", action="store_true", help="real processes instead of peers in memory")
    add("--seeds", type=int, default=0, help="number of random liars to run instead (default 0)")
    add("--first-seed", type=int, default=0, help="first seed of them (default 0)")
    add("--save", action="store_true", help=f"also write the rows to {SAVED.name} and {PAGE.name}")
    add("--json", action="store_true", help="the rows as JSON on the last line")
    options = parser.parse_args()
    known = list(attacks_real.ATTACKS) if options.real else in_memory
    options.only = options.only.split(",") if options.only else known
    if unknown := [name for name in options.only if name not in known]:
        parser.error(f"no attack {', '.join(unknown)}; choose from {', '.join(known)}")
    return options


def main() -> int:
    """Run what is asked for; return 1 if a seed failed, or an attack was not refused."""
    options = arguments()
    if options.seeds:
        found = {"seeds": run_seeds(options.first_seed, options.seeds)}
        failed = bool(found["seeds"]["failed"])
    else:
        found = measure(options.only, real=options.real)
        for name, part in found.items():
            print(f"\n{table(name, part['rows'])}")
        failed = any(not row["held"] for row in found.get("doors", {"rows": []})["rows"])
    if options.save:
        save(found)
    if options.json:
        print(json.dumps(found))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
