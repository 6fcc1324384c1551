#!/usr/bin/env python3
"""Measure the dashboard with many peers and a long history.

    ./scripts/bench dashboard                       200 peers, 100,000 rounds (about 15 minutes)
    ./scripts/bench dashboard --peers 20 --rounds 2000
    ./scripts/bench dashboard --save                also write docs/benchmarks/dashboard.md, .json
    ./scripts/bench dashboard --json                the result as JSON on the last line

The run is a directory as a coordinator leaves it, with entries, rounds, events and peers of the
sizes of a real run; it lies in build/bench_dashboard and stays for the next time. Each row is a
process of its own with a screen of 200 x 60 cells that goes nowhere. "Watching" parses a new status
a second, as it comes from the coordinator, and draws it: every peer's numbers and the newest round
change each time. TLS and the terminal itself are not in it.
"""

import argparse
import asyncio
import json
import random
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from circumstances import circumstances
from rows import put_between

from atoll.coordinator.dashboard.app import DashboardApp
from atoll.coordinator.dashboard.replay import ReplayApp
from atoll.coordinator.history import History
from atoll.coordinator.ledger import Ledger
from atoll.coordinator.recorded import Recording, entries_of
from atoll.coordinator.run.status import RoundSummary, RunStatus
from atoll.optim.log.entry import Elector, Entry, Member, Part

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "bench_dashboard"
SAVED = ROOT / "docs" / "benchmarks" / "dashboard.json"
PAGE = ROOT / "docs" / "benchmarks" / "dashboard.md"
MARKS = ("<!-- rows of dashboard.json -->", "<!-- end of rows -->")
SCREEN = (200, 60)
WATCH_S = 20.0
NUM_SEEKS = 50
CASES = ("open", "watch", "replay")


def record(folder: Path, *, peers: int, rounds: int) -> dict[str, float]:
    """Write the directory of a run, and return what a round costs its coordinator."""
    from support.organiser import end_a_run, tiny_spec
    from support.status import make_events, make_peer

    end_a_run(folder, tiny_spec(run={"name": "long", "rounds": rounds}), rounds=0)
    with closing(History(folder / "history.db")) as history:
        for event in make_events(2000, 3):
            history.add_event(event)
        history.put_peers([make_peer(i, position=rounds) for i in range(peers)])
        for row, entry in _rounds(folder, peers, rounds):
            history.put_round(row)
            _note(row.position, rounds, entry)
        with closing(sqlite3.connect(folder / "log" / "log.sqlite")) as db:
            ledger = Ledger(history, partial(entries_of, db))
            began_s = time.process_time()
            ledger.mark(rounds - rounds % 32)
            marking_s = time.process_time() - began_s
    return {"marks_ms_per_round": 1e3 * marking_s / rounds}


def _note(position: int, rounds: int, entry: bytes) -> None:
    if position % 5000 == 0:
        told = f"round {position} of {rounds}, an entry has {len(entry)} bytes"
        print(f"bench dashboard: {told}", file=sys.stderr, flush=True)


def _rounds(folder: Path, peers: int, rounds: int) -> Iterator[tuple[RoundSummary, bytes]]:
    """Write the log's entries, and yield each round."""
    from support.status import make_round, peer_id

    rng = random.Random(1)
    ids = [peer_id(i) for i in range(peers)]
    with closing(sqlite3.connect(folder / "log" / "log.sqlite")) as db:
        run_id = bytes(db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()[0])
        members = tuple(_member(name, rng) for name in ids)
        for position in range(rounds):
            if position % 64 == 0:  # other numbers now and then: making them takes most of the time
                members = tuple(_member(name, rng) for name in ids)
                absent = ids[rng.randrange(peers)]
            kept = tuple(m for m in members if m.peer_id != absent) if peers > 1 else members
            entry = _entry(run_id, position, kept).encode()
            row = (position, 0, entry, b"", position.to_bytes(32), 0, 1)
            db.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            if position % 1000 == 0:
                db.commit()
            summary = make_round(position + 1, num_peers=peers, left_out=[absent])
            sent = {name: rng.randrange(1 << 20) for name in ids[:64]}
            yield replace(summary, peer_bytes=sent, tokens=sum(m.tokens for m in kept)), entry
        db.commit()


def _member(peer_id: str, rng: random.Random) -> Member:
    return Member(
        peer_id=peer_id,
        incarnation=f"{rng.randrange(1 << 62):032x}",
        weight=1.0,
        clip=1.0,
        norm=rng.random(),
        tokens=61_440,
        steps=30,
        loss=rng.random() + 1,
    )


def _entry(run_id: bytes, position: int, members: tuple[Member, ...]) -> Entry:
    parts = tuple(
        Part(
            start_cell=i,
            stop_cell=i + 1,
            owner=i % len(members),
            generation=0,
            wire_bytes=0,
            digest=bytes(32),
        )
        for i in range(16)
    )
    electors = tuple(Elector(peer_id=m.peer_id, incarnation=m.incarnation) for m in members[:16])
    return Entry(
        run_id=run_id,
        epoch=0,
        position=position,
        kind="update",
        previous_chain=bytes(32),
        fragment=0,
        lr=0.5,
        momentum=0.5,
        members=members,
        parts=parts,
        electorate=electors,
    )


class Watched:
    """Counts what a process has used."""

    def __init__(self) -> None:
        self._began_s, self._cpu_s = time.monotonic(), time.process_time()

    def shares(self) -> dict[str, float]:
        """Return the share of a core since the start, and the most memory."""
        seconds = time.monotonic() - self._began_s
        return {
            "cpu_share": (time.process_time() - self._cpu_s) / seconds,
            "peak_mb": peak_mb(),
        }


def peak_mb() -> float:
    """Return the most memory of this program; `getrusage` counts what started it as well."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM"))


async def _with_app(app: DashboardApp, use: Any) -> None:
    async with app.run_test(size=SCREEN) as pilot:
        await use(app, pilot)


def measure_open(folder: Path, began_s: float) -> dict[str, float]:
    """Open the directory, and draw it."""
    found: dict[str, float] = {}

    async def main() -> None:
        recording = Recording(folder)

        async def feed() -> RunStatus:
            return recording.now

        async def use(app: DashboardApp, pilot: Any) -> None:
            await app.poll()
            await pilot.pause()
            found["seconds_to_open"] = time.time() - began_s

        await _with_app(DashboardApp(feed, interval_s=None), use)

    asyncio.run(main())
    return found | {"peak_mb": peak_mb()}


def measure_watch(folder: Path, _: float) -> dict[str, float]:
    """Draw a new status a second."""
    status = Recording(folder).now
    last = status.history[-1]
    raw = status.to_json()
    encode_s = [_timed(status.to_json) for _ in range(5)]
    found: dict[str, float] = {
        "status_mb": len(raw) / 1e6,
        "encode_ms": 1e3 * statistics.median(encode_s),
    }
    turns = iter(range(1, 10_000))
    statuses: list[bytes] = []
    for turn in range(int(WATCH_S) + 8):
        row = replace(last, position=last.position + turn, at=last.at + turn)
        peers = [
            replace(p, state="training", step=turn % 30, last_seen_s=turn / 10)
            for p in status.peers
        ]
        changed = replace(
            status, history=[*status.history[1:], row], peers=peers, now=status.now + turn
        )
        statuses.append(changed.to_json())

    async def feed() -> RunStatus:
        return RunStatus.from_json(statuses[next(turns) % len(statuses)])

    async def use(app: DashboardApp, pilot: Any) -> None:
        await asyncio.sleep(3)  # the first screens
        watched = Watched()
        await asyncio.sleep(WATCH_S)
        found.update(watched.shares())

    asyncio.run(_with_app(DashboardApp(feed), use))
    return found


def measure_replay(folder: Path, began_s: float) -> dict[str, float]:
    """Open a replay, go to places at random, and play."""
    found: dict[str, float] = {}

    async def main() -> None:
        recording = Recording(folder)

        class Directory:
            async def now(self) -> RunStatus:
                return recording.now

            async def at(self, position: int) -> RunStatus:
                return await asyncio.to_thread(recording.at, position)

        async def use(app: DashboardApp, pilot: Any) -> None:
            assert isinstance(app, ReplayApp)
            app.tape.is_playing = False
            while app.view.status is None:
                await asyncio.sleep(0.01)
            found["seconds_to_open"] = time.time() - began_s
            rng, seconds = random.Random(2), []
            for _ in range(NUM_SEEKS):
                app.tape.go_to(rng.randrange(app.tape.total))
                begin_s = time.monotonic()
                await app.poll()
                seconds.append(time.monotonic() - begin_s)
            found["seek_ms_median"] = 1e3 * statistics.median(seconds)
            found["seek_ms_most"] = 1e3 * max(seconds)
            app.tape.go_to(app.tape.total // 2)
            app.tape.speed, app.tape.is_playing = 5.0, True
            watched = Watched()
            await asyncio.sleep(WATCH_S)
            found.update(watched.shares())

        await _with_app(ReplayApp(Directory(), recording.now), use)

    asyncio.run(main())
    return found


def _timed(work: Any) -> float:
    began_s = time.monotonic()
    work()
    return time.monotonic() - began_s


def run_case(case: str, folder: Path) -> dict[str, float]:
    """Measure a case in a process of its own."""
    words = [sys.executable, __file__, "--case", case, "--folder", str(folder)]
    words += ["--began", str(time.time())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{case}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


NAMES = {
    "seconds_to_open": "s from its start to the first screen",
    "peak_mb": "MB of memory at most",
    "cpu_share": "of a core",
    "status_mb": "MB of a status",
    "encode_ms": "ms of the coordinator to write a status",
    "seek_ms_median": "ms to go to a round, median",
    "seek_ms_most": "ms to go to a round, at most",
}
TITLES = {
    "open": "open a directory",
    "watch": "watch, a status a second",
    "replay": "replay at 5 rounds/s",
}


def table(found: dict[str, Any]) -> str:
    """Return the rows as Markdown."""
    lines = ["| | | |", "|---|---:|---|"]
    for case, row in found["cases"].items():
        for name, value in row.items():
            shown = f"{value:.0%}" if name == "cpu_share" else f"{value:.3g}"
            lines.append(f"| {TITLES[case]} | {shown} | {NAMES[name]} |")
    return "\n".join(lines)


def save(found: dict[str, Any]) -> None:
    """Write the report, and the table between the marks of the page."""
    SAVED.write_text(json.dumps(found, indent=1) + "\n")
    head = (
        f"{found['date']}, commit {found['commit']}, {found['machine']}; "
        f"{found['peers']} peers, {found['rounds']:,} rounds."
    )
    put_between(PAGE, MARKS, f"{head}\n\n{table(found)}")


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--peers", type=int, default=200, help="peers of a round (default %(default)s)")
    add("--rounds", type=int, default=100_000, help="rounds (default %(default)s)")
    add("--save", action="store_true", help=f"save the rows in {SAVED.name} and {PAGE.name}")
    add("--json", action="store_true", help="print the result as JSON on the last line")
    add("--case", choices=CASES, help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    add("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure all cases, or one of them in this process."""
    options = arguments()
    if options.case:
        measure = {"open": measure_open, "watch": measure_watch, "replay": measure_replay}
        print(json.dumps(measure[options.case](options.folder, options.began)))
        return
    folder = FOLDER / f"{options.peers}-{options.rounds}"
    told = folder / "costs.json"
    if not told.exists():
        folder.mkdir(parents=True, exist_ok=True)
        told.write_text(json.dumps(record(folder, peers=options.peers, rounds=options.rounds)))
    found = {
        **circumstances(),
        "peers": options.peers,
        "rounds": options.rounds,
        **json.loads(told.read_text()),
        "log_gb": sum(p.stat().st_size for p in (folder / "log").rglob("*.sqlite")) / 1e9,
        "history_gb": (folder / "history.db").stat().st_size / 1e9,
        "cases": {case: run_case(case, folder) for case in CASES},
    }
    print(table(found))
    if options.save:
        save(found)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
