#!/usr/bin/env python3
"""Measure how long a newcomer takes from `atoll peer` until it trains.

    ./scripts/bench recovery                     10M and 100M parameters; needs root, 10 minutes
    ./scripts/bench recovery --only 10m
    ./scripts/bench recovery --save              also write docs/benchmarks/recovery.md and .json
    ./scripts/bench recovery --json              the results as JSON on the last line

Three peers train, with links of 100 Mbit/s and 50 ms between any two; a fourth joins them, which
has nothing. The bound is the time in which its link carries the state, 8 bytes a parameter, and
the target is 1.3 times the bound and 5 s until it trains. Its first window has weight 0, as that of
all newcomers, so the first one that counts follows a window later. All share the cores of this
machine, and windows mostly wait, as for an accelerator. Exits with 1 if a target is missed, and
with 2 if nothing can be measured.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench_allreduce import lab_is_possible
from bench_nat import CUSTOM, Case, committed_at_s, events, progress, wait_until
from circumstances import circumstances
from rows import put_between

from atoll.coordinator.run.spec import RunSpec
from atoll.dht.testing.wan import WanLab, WanLink

ROOT = Path(__file__).resolve().parent.parent
SAVED = ROOT / "docs" / "benchmarks" / "recovery.json"
PAGE = ROOT / "docs" / "benchmarks" / "recovery.md"
MARKS = ("<!-- rows of recovery.json -->", "<!-- end of rows -->")
MBIT = 100.0
DONORS = 3
STATE_BYTES = 8  # a parameter: its value, and the outer momentum
RATIO, BESIDE_S = 1.3, 5.0  # the target
START_S, JOINED_S = 300.0, 900.0
ROUNDS_BEFORE = 4


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, and how long its windows wait: an exchange has to fit into one."""

    params: int
    sizes: dict[str, int]
    step_wait_s: float
    inner_steps: int = 16


SIZES = {
    "10m": Size(
        params=9_998_208,
        sizes={"dim": 384, "num_layers": 5, "num_heads": 6, "ffn_dim": 1206},
        step_wait_s=1.0,
    ),
    "100m": Size(
        params=100_900_864,
        sizes={"dim": 1024, "num_layers": 8, "num_heads": 16, "ffn_dim": 2731},
        step_wait_s=2.0,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One size. Seconds count from the start of the newcomer's process."""

    size: str
    params: int
    asks_s: float
    """when it begins to fetch a state: started, joined and connected"""
    trains_s: float
    """when it has the state and trains"""
    counted_s: float
    """when its first window that counts begins"""
    received_bytes: int
    """by its host until it trained"""
    bound_s: float
    window_s: float
    """median time between two rounds before it came"""
    slower: float
    """that time while it recovered, over the time before; 1 if nobody noticed"""

    @property
    def target_s(self) -> float:
        """Return the seconds that it may take."""
        return RATIO * self.bound_s + BESIDE_S

    @property
    def missed(self) -> list[str]:
        """The targets that this row misses."""
        late = self.trains_s > self.target_s
        return [f"{self.size}: {self.trains_s:.1f} s, {self.target_s:.1f} s allowed"] * late


def spec_of(case: Case, size: Size) -> RunSpec:
    """Write the model into the case's folder; return the run."""
    case.write_model(size.step_wait_s, "nano", size.sizes)
    text = case.folder / "text.txt"
    text.write_text("A newcomer takes the state from those that train. " * 20_000)
    return RunSpec.from_dict(
        {
            "run": {"name": "recovery"},
            "model": {"custom": CUSTOM},
            "data": {"source": str(text), "seq_len": 16},
            "inner": {"batch_size": 1, "warmup_steps": 2},
            "outer": {"inner_steps": size.inner_steps, "windows": "deadline"},
            "round": {"min_peers": DONORS, "snapshot_every": 2},
            "coordinator": {"advertise": case.lab.ip(0)},
        }
    )


def measure(name: str, size: Size) -> Row:
    """Let a newcomer join a run of this size."""
    newcomer = DONORS + 1
    links = [WanLink(up=MBIT, down=MBIT)] * (newcomer + 1)
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder, WanLab(links) as lab:
        with Case(lab=lab, folder=Path(folder)) as case:
            case.start_coordinator(spec_of(case, size))
            for host in range(1, newcomer):
                case.start_peer(host)

            def until(holds: Callable[[], bool]) -> None:
                wait_until(lambda: holds() or ended(case), JOINED_S, case.words)
                if ended(case):
                    raise RuntimeError(f"a process ended\n{case.words()}")

            until(lambda: case.position() >= ROUNDS_BEFORE)
            progress(f"{name}: {DONORS} peers train; a newcomer starts")
            before_bytes, began_s = lab.received[newcomer], time.time()
            case.start_peer(newcomer)
            log = case.folder / f"peer-{newcomer}.log"
            until(lambda: bool(_at(log, "ready")))
            received_bytes = lab.received[newcomer] - before_bytes
            progress(f"{name}: it trains after {_at(log, 'ready')[0] - began_s:.1f} s")
            until(lambda: bool(counted_s(log)))
            decided = sorted(committed_at_s(case.folder / "peer-1.log").values())
            return row_of(name, size, log, began_s, decided, received_bytes)


def ended(case: Case) -> bool:
    """Return whether a process of the run is over, which none should be."""
    return any(child.poll() is not None for child in case.children.values())


def row_of(
    name: str,
    size: Size,
    log: Path,
    began_s: float,
    decided_s: Sequence[float],
    received_bytes: int,
) -> Row:
    """Return what the log of the newcomer, and the rounds of the others, show."""
    trains_s = _at(log, "ready")[0]
    fetches = [e["time"] for e in events(log) if e.get("phase") == "recover"]
    gaps = [(later, later - one) for one, later in pairwise(decided_s)]
    before = [gap for at_s, gap in gaps if at_s <= began_s]
    during = [gap for at_s, gap in gaps if began_s < at_s <= trains_s] or before
    return Row(
        size=name,
        params=size.params,
        asks_s=min(fetches, default=trains_s) - began_s,
        trains_s=trains_s - began_s,
        counted_s=counted_s(log)[0] - began_s,
        received_bytes=received_bytes,
        bound_s=STATE_BYTES * size.params * 8e-6 / MBIT,
        window_s=statistics.median(before),
        slower=statistics.mean(during) / statistics.median(before),
    )


def counted_s(log: Path) -> list[float]:
    """Return when each window of a peer that was counted began, as its own log tells.

    A window begins with the start of training, or with the round before its own.
    """
    starts = _at(log, "ready")[:1]
    found = []
    for each in events(log):
        if each["kind"] == "round" and starts:
            if each["counted"]:
                found.append(starts[-1])
            starts.append(each["time"])
    return found


def _at(log: Path, kind: str) -> list[float]:
    return [each["time"] for each in events(log) if each["kind"] == kind]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    lines = [
        "| parameters | fetches after | trains after | first counted window after | bound | "
        "allowed | received | windows meanwhile | date, commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        allowed_s = RATIO * row["bound_s"] + BESIDE_S
        lines.append(
            f"| {row['size']} | {row['asks_s']:.1f} s | {row['trains_s']:.1f} s | "
            f"{row['counted_s']:.1f} s | {row['bound_s']:.1f} s | {allowed_s:.1f} s | "
            f"{row['received_bytes'] / row['params']:.2f} B/param | {row['slower']:.2f} of "
            f"{row['window_s']:.1f} s | {row['date']}, {row['commit']} |"
        )
    return "\n".join(lines)


def save(rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows into the benchmark's files; those of other sizes stay."""
    kept = json.loads(SAVED.read_text()) if SAVED.exists() else []
    new = {row["size"] for row in rows}
    all_rows = [row for row in kept if row["size"] not in new] + list(rows)
    all_rows.sort(key=lambda row: row["params"])
    SAVED.write_text(json.dumps(all_rows, indent=1) + "\n")
    put_between(PAGE, MARKS, table(all_rows))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(
        prog="bench recovery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--only", default=",".join(SIZES), help=f"of: {', '.join(SIZES)}")
    result.add_argument("--save", action="store_true", help="save the rows in docs/benchmarks")
    result.add_argument("--json", action="store_true", help="print the rows as JSON, last")
    return result


def main() -> int:
    """Do what the arguments ask for."""
    options = parser().parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in SIZES]:
        print(f"bench recovery: no size {unknown[0]}; choose of {', '.join(SIZES)}")
        return 2
    if problem := lab_is_possible():
        print(f"bench recovery: {problem}; run it as root on Linux", file=sys.stderr)
        return 2
    rows = [measure(name, SIZES[name]) for name in names]
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
