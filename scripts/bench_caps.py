#!/usr/bin/env python3
"""Measure what `--max-mbit` leaves of a link: a peer's bytes, through rounds and recoveries.

    ./scripts/bench caps                  needs root, 5 minutes
    ./scripts/bench caps --mbit 20        another cap (default 10 Mbit/s, of links of 100)
    ./scripts/bench caps --save           also write docs/benchmarks/caps.md and .json
    ./scripts/bench caps --json           the results as JSON on the last line

A peer with the cap trains with one without; a third one with the cap joins them, so that the first
also serves a state. The lab counts all bytes of each host, with the headers of IP and TCP. The
documentation promises what a peer sends and receives, over seconds (docs/join.md); so the most that
a host sent, or received, within 10 s is at most 1.05 times the cap. Exits with 1 if it was more,
and with 2 if nothing can be measured.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_allreduce import lab_is_possible
from bench_nat import CUSTOM, Case, events, progress, wait_until
from circumstances import circumstances
from rows import put_between

from atoll.coordinator.run.spec import RunSpec
from atoll.dht.testing.wan import WanLab, WanLink

ROOT = Path(__file__).resolve().parent.parent
SAVED = ROOT / "docs" / "benchmarks" / "caps.json"
PAGE = ROOT / "docs" / "benchmarks" / "caps.md"
MARKS = ("<!-- rows of caps.json -->", "<!-- end of rows -->")
LINK_MBIT = 100.0
CAPPED, FREE, JOINER = 1, 2, 3  # hosts; 0 is the coordinator
MODEL = {"dim": 256, "num_layers": 4, "num_heads": 4, "ffn_dim": 700}  # 3.3M parameters
STEP_WAIT_S = 1.5
INNER_STEPS = 4
ROUNDS_BEFORE, ROUNDS_MEASURED = 2, 4
JOINED_S = 400.0
SPAN_S = 10.0  # "over seconds": a message of 1 MiB takes five at a third of 5 Mbit/s
LOOK_S = 0.25
ALLOWED = 1.05


@dataclass(frozen=True, kw_only=True)
class Row:
    """One host in one phase; rates in Mbit/s, of all bytes."""

    phase: str
    cap_mbit: float
    seconds: float
    sent_mean: float
    sent_most: float
    """within `SPAN_S`"""
    received_mean: float
    received_most: float

    @property
    def missed(self) -> list[str]:
        """The targets that this row misses."""
        most = ALLOWED * self.cap_mbit
        found = {"sent": self.sent_most, "received": self.received_most}
        return [
            f"{self.phase}: {rate:.2f} Mbit/s {way} within {SPAN_S:g} s, {most:g} allowed"
            for way, rate in found.items()
            if rate > most
        ]


@dataclass
class Counts:
    """Readings of one host's counters."""

    lab: WanLab
    host: int

    def __post_init__(self) -> None:
        self.looks = [self._look()]

    def look(self) -> None:
        """Read the counters."""
        self.looks.append(self._look())

    def _look(self) -> tuple[float, int, int]:
        return time.monotonic(), self.lab.sent[self.host], self.lab.received[self.host]

    def row(self, phase: str, cap_mbit: float) -> Row:
        """Return what was sent and received since the first reading."""
        seconds = self.looks[-1][0] - self.looks[0][0]
        means = [(self.looks[-1][way] - self.looks[0][way]) * 8e-6 / seconds for way in (1, 2)]
        return Row(
            phase=phase,
            cap_mbit=cap_mbit,
            seconds=seconds,
            sent_mean=means[0],
            sent_most=most_mbit([(at_s, sent) for at_s, sent, _ in self.looks]),
            received_mean=means[1],
            received_most=most_mbit([(at_s, received) for at_s, _, received in self.looks]),
        )


def most_mbit(readings: Sequence[tuple[float, int]]) -> float:
    """Return the highest rate within `SPAN_S`; over all of it if that is shorter."""
    found, start = 0.0, 0
    for at_s, count in readings:
        while readings[start + 1 : start + 2] and at_s - readings[start + 1][0] >= SPAN_S:
            start += 1
        began_s, before = readings[start]
        found = max(found, (count - before) * 8e-6 / max(at_s - began_s, SPAN_S))
    return found


def spec_of(case: Case) -> RunSpec:
    """Write model and text into the case's folder; return the run."""
    case.write_model(STEP_WAIT_S, "nano", MODEL)
    text = case.folder / "text.txt"
    text.write_text("What others share, a peer leaves to them. " * 20_000)
    return RunSpec.from_dict(
        {
            "run": {"name": "caps"},
            "model": {"custom": CUSTOM},
            "data": {"source": str(text), "seq_len": 16},
            "inner": {"batch_size": 1, "warmup_steps": 2},
            "outer": {"inner_steps": INNER_STEPS, "windows": "deadline"},
            "round": {"min_peers": 2, "snapshot_every": 2},
            "coordinator": {"advertise": case.lab.ip(0)},
        }
    )


def measure(cap_mbit: float) -> list[Row]:
    """Hold rounds with a capped peer, then let another capped one join."""
    links = [WanLink(up=LINK_MBIT, down=LINK_MBIT)] * (JOINER + 1)
    capped = ("--max-mbit", f"{cap_mbit:g}")
    with tempfile.TemporaryDirectory(prefix="caps-") as folder, WanLab(links) as lab:
        with Case(lab=lab, folder=Path(folder)) as case:
            case.start_coordinator(spec_of(case))
            case.start_peer(CAPPED, *capped)
            case.start_peer(FREE)

            def until(holds: Callable[[], bool], *counts: Counts) -> None:
                def look() -> bool:
                    for each in counts:
                        each.look()
                    return holds() or over(case)

                wait_until(look, JOINED_S, case.words)
                if over(case):
                    raise RuntimeError(f"a process ended\n{case.words()}")

            until(lambda: case.position() >= ROUNDS_BEFORE)
            progress("two peers hold rounds")
            in_rounds, beside = Counts(lab, CAPPED), Counts(lab, FREE)
            end = case.position() + ROUNDS_MEASURED
            until(lambda: case.position() >= end, in_rounds, beside)
            progress("a third peer joins")
            donor, joiner = Counts(lab, CAPPED), Counts(lab, JOINER)
            case.start_peer(JOINER, *capped)
            log = case.folder / f"peer-{JOINER}.log"
            until(lambda: any(each["kind"] == "ready" for each in events(log)), donor, joiner)
            return [
                in_rounds.row("rounds", cap_mbit),
                donor.row("rounds, and serving the joiner", cap_mbit),
                joiner.row("the joiner, until it trains", cap_mbit),
            ]


def over(case: Case) -> bool:
    """Return whether a process of the run has ended, which none should."""
    return any(child.poll() is not None for child in case.children.values())


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    head = (
        f"| what the capped host did | cap | sent, mean | sent, most in {SPAN_S:g} s | "
        f"received, mean | received, most in {SPAN_S:g} s | over | date, commit |"
    )
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    lines += [
        f"| {row['phase']} | {row['cap_mbit']:g} | {row['sent_mean']:.2f} | "
        f"{row['sent_most']:.2f} | {row['received_mean']:.2f} | {row['received_most']:.2f} | "
        f"{row['seconds']:.0f} s | {row['date']}, {row['commit']} |"
        for row in rows
    ]
    return "\n".join(lines)


def save(rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows into the benchmark's files; those of other caps stay."""
    kept = json.loads(SAVED.read_text()) if SAVED.exists() else []
    new = {row["cap_mbit"] for row in rows}
    all_rows = [row for row in kept if row["cap_mbit"] not in new] + list(rows)
    SAVED.write_text(json.dumps(all_rows, indent=1) + "\n")
    put_between(PAGE, MARKS, table(all_rows))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(
        prog="bench caps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--mbit", type=float, default=10.0, help="the cap (default: 10)")
    result.add_argument("--save", action="store_true", help="save the rows in docs/benchmarks")
    result.add_argument("--json", action="store_true", help="print the rows as JSON, last")
    return result


def main() -> int:
    """Do what the arguments ask for."""
    options = parser().parse_args()
    if problem := lab_is_possible():
        print(f"bench caps: {problem}; run it as root on Linux", file=sys.stderr)
        return 2
    rows = measure(options.mbit)
    told = [asdict(row) | circumstances() for row in rows]
    print(table(told))
    missed = [text for row in rows for text in row.missed]
    for text in missed:
        print(f"missed: {text}")
    if options.save:
        save(told)
    if options.json:
        print(json.dumps(told))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
