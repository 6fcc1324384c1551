#!/usr/bin/env python3
"""Count the messages and control bytes of rounds with many peers, in memory.

    ./scripts/bench scale                             the saved table
    ./scripts/bench scale --rerun --save              count again (minutes) and save
    ./scripts/bench scale --rerun --peers 64 --cells 16
    ./scripts/bench scale --rerun --peers 144 --cells 144 --reduction rows
    ./scripts/bench scale --json                      the rows as JSON on the last line

The peers are those of `tests/support/swarm.py`: real rounds, log and votes on an in-memory network
with a virtual clock, so that hundreds of links of 100 Mbit/s and 50 ms fit one machine. A cell
holds 64 values instead of 65,536. All remaining bytes are therefore control traffic, and the times
are the cost of control alone. A part has one cell, so peers own as many parts as there are cells.
The second table includes bodies: cells of 512 values in int8, one part per peer, reduced flat and
in rows. `bench allreduce` measures how long bodies take.
"""

import argparse
import asyncio
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from circumstances import commit, machine, today
from rows import put_between

from atoll.compression import parse
from atoll.dht.testing import MemoryRoster
from atoll.dht.testing.memory import FRAME_BYTES, MemoryNetwork, run_virtual
from atoll.optim.log.entry import Entry, choose_electors
from atoll.optim.reduction.cells import LENGTH
from atoll.optim.state import layout as cuts
from atoll.optim.state import pieces
from atoll.optim.state.layout import Layout
from atoll.peer.rounds import messages as wire
from support.swarm import Swarm, SwarmPeer, signed_epoch

ROOT = Path(__file__).resolve().parent.parent
SAVED = ROOT / "docs" / "benchmarks" / "scale.json"
PAGE = ROOT / "docs" / "benchmarks" / "scale.md"
MARKS = ("<!-- rows of scale.json -->", "<!-- end of rows -->")
CELL_VALUES = 64
BODY_VALUES = 512  # in int8, for the table with bodies
LATENCY_S = 0.025
MBIT_S = 100.0
WINDOW_S = 60.0
MEASURED = 1  # the second round, in which peers have already met
SETTLE_S = 10.0  # for messages after the last commit
SPREAD_S = 0.5  # within which all windows end
Group = tuple[int, int, str]
"""Peers, cells, and how bodies are reduced; empty: control alone, with a run's own choice."""
CONTROL: tuple[Group, ...] = (
    (16, 16, ""),
    (64, 16, ""),
    (256, 16, ""),
    (1000, 16, ""),
    (64, 64, ""),
    (256, 64, ""),
)
BODIES: tuple[Group, ...] = tuple(
    (peers, peers, how) for peers in (64, 144, 256) for how in ("flat", "rows")
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One warm round of a group."""

    peers: int
    cells: int
    members: int
    electors: int
    """of the next position"""
    leader_messages: int
    """sent, all methods"""
    leader_bytes: int
    peer_messages: float
    """median over the others"""
    peer_bytes: float
    most_bytes: int
    """of the other peer that sends most"""
    connections: float
    """median over the others: number of peers that it exchanged messages with"""
    messages_by_method: dict[str, int]
    """of all peers"""
    bytes_by_method: dict[str, int]
    roster_reads: int
    """records that all peers read in a round"""
    rendezvous_s: float
    """from the last window's end to the first peer that reduces; virtual"""
    round_s: float
    """from the first peer that reduces to the last commit; virtual"""
    entry_bytes: int
    peer_mb: float
    """a peer's share of the memory of the process"""
    cpu_s: float
    """of this machine, for the round of all peers"""
    date: str
    commit: str
    values: int = CELL_VALUES
    """of a cell"""
    reduction: str = "flat"
    """or rows"""


class CountingNetwork(MemoryNetwork):
    """Counts what is sent, by sender and method."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.messages: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.met: defaultdict[str, set[str]] = defaultdict(set)

    def forget(self) -> None:
        """Start counting from here."""
        self.messages.clear()
        self.bytes.clear()
        self.met.clear()

    def _send(self, pipe: Any, size: int, action: Callable[[], None]) -> float:
        key = pipe.src.peer_id, pipe.method
        self.messages[key] += 1
        self.bytes[key] += size + FRAME_BYTES
        self.met[pipe.src.peer_id].add(pipe.dst.peer_id)
        self.met[pipe.dst.peer_id].add(pipe.src.peer_id)
        return super()._send(pipe, size, action)


@dataclass
class Watch:
    """The times of the phases of the measured position, on the swarm's clock."""

    last_ready_s: float = 0.0
    first_reduce_s: float = 0.0

    def on_phase(self, swarm: Swarm, phase: str, position: int) -> None:
        if position != MEASURED or self.first_reduce_s:
            return
        if phase == "wait":
            self.last_ready_s = swarm.now()
        elif phase == "reduce":
            self.first_reduce_s = swarm.now()


def swarm_of(folder: Path, cells: int) -> Swarm:
    codec = "fp32" if cuts.CELL == CELL_VALUES else "int8"
    layout = Layout(names=("w",), shapes=((cells * cuts.CELL,),))
    swarm = Swarm(folder, layout=layout, codec=codec)
    swarm.network = CountingNetwork(random.Random(7), latency_s=LATENCY_S)
    return swarm


async def warm_round(swarm: Swarm, peers: Sequence[SwarmPeer], cells: int) -> Row:
    """Run the second round of a group that has met."""
    watch = Watch()
    swarm.on_phase = lambda peer, phase, position: watch.on_phase(swarm, phase, position)
    network, records = swarm.network, count_roster_reads()
    assert isinstance(network, CountingNetwork)
    await all_at(swarm, peers, MEASURED)
    await asyncio.sleep(SETTLE_S)
    network.forget()
    records.clear()
    began_cpu_s = time.process_time()
    await all_at(swarm, peers, MEASURED + 1)
    ended_s, cpu_s = swarm.now(), time.process_time() - began_cpu_s
    await asyncio.sleep(SETTLE_S)
    entry = peers[0].replica.store.headers(MEASURED, 1)[0].entry
    decided = Entry.decode(entry)
    messages, sent = of_senders(network.messages), of_senders(network.bytes)
    leader = max(sent, key=lambda name: sent[name])
    others = [p.identity.peer_id for p in peers if p.identity.peer_id != leader]
    return Row(
        peers=len(peers),
        cells=cells,
        values=cuts.CELL,
        reduction="rows" if len(decided.members) > wire.RELAYED_ABOVE else "flat",
        members=len(decided.members),
        electors=len(decided.electorate),
        leader_messages=messages[leader],
        leader_bytes=sent[leader],
        peer_messages=statistics.median(messages[name] for name in others),
        peer_bytes=statistics.median(sent[name] for name in others),
        most_bytes=max(sent[name] for name in others),
        connections=statistics.median(len(network.met[name]) for name in others),
        messages_by_method=of_methods(network.messages),
        bytes_by_method=of_methods(network.bytes),
        roster_reads=sum(records),
        rendezvous_s=round(watch.first_reduce_s - watch.last_ready_s, 3),
        round_s=round(ended_s - watch.first_reduce_s, 3),
        entry_bytes=len(entry),
        peer_mb=round(memory_mb() / len(peers), 2),
        cpu_s=round(cpu_s, 1),
        date=today(),
        commit=commit(),
    )


async def all_at(swarm: Swarm, peers: Sequence[SwarmPeer], position: int) -> None:
    await swarm.until(lambda: all(p.replica.position >= position for p in peers), 3600.0)


def count_roster_reads() -> list[int]:
    """Record the lengths of all rosters that are read from now on."""
    read, plain = [], MemoryRoster.peers

    async def counted(roster: MemoryRoster) -> dict[str, Any]:
        found = await plain(roster)
        read.append(len(found))
        return found

    MemoryRoster.peers = counted  # type: ignore[method-assign]
    return read


def of_senders(counted: Counter[tuple[str, str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for (sender, _), number in counted.items():
        total[sender] += number
    return total


def of_methods(counted: Counter[tuple[str, str]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for (_, method), number in counted.items():
        total[method] += number
    return dict(sorted(total.items()))


def memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(num_peers: int, cells: int, reduction: str) -> Row:
    """Measure one group in this process; with a `reduction`, bodies are counted as well."""
    cuts.CELL = BODY_VALUES if reduction else CELL_VALUES  # type: ignore[misc]
    pieces.CELL = cuts.CELL  # type: ignore[misc]
    if reduction:
        wire.RELAYED_ABOVE = 2 if reduction == "rows" else num_peers
    torch.set_num_threads(1)
    rng, base_mb = random.Random(1), memory_mb()

    async def main() -> Row:
        with tempfile.TemporaryDirectory(prefix="scale-") as folder:
            swarm = swarm_of(Path(folder), cells)
            windows = [WINDOW_S - SPREAD_S * rng.random() for _ in range(num_peers)]
            peers = [
                swarm.add(window_s=window, link_mbit_s=MBIT_S, declared_mbit_s=MBIT_S)
                for window in windows
            ]
            try:
                electors = choose_electors([peer.ctx.me for peer in peers])
                record = signed_epoch(1, 0, swarm.chain, list(electors))
                for peer in peers:
                    await peer.start(record)
                row = await warm_round(swarm, peers, cells)
                return Row(**asdict(row) | {"peer_mb": (memory_mb() - base_mb) / num_peers})
            finally:
                await swarm.stop()

    return run_virtual(main())


def table(rows: Sequence[Row]) -> str:
    """Format the rows as Markdown: control alone, then reductions with their bodies."""
    control = [r for r in rows if r.values == CELL_VALUES]
    bodies = [r for r in rows if r.values == BODY_VALUES]
    return "\n".join([*control_table(control), "", *body_table(bodies)])


def control_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| peers | parts | reduction | messages: leader | a peer | control, kB: leader | a peer "
        "| at most | connections | entry, kB | rendezvous, s | round, s | MB per peer | CPU, s "
        "| commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r.peers} | {r.cells} | {r.reduction} | {r.leader_messages:,} "
            f"| {r.peer_messages:,.0f} | {r.leader_bytes / 1e3:,.0f} | {r.peer_bytes / 1e3:,.0f} "
            f"| {r.most_bytes / 1e3:,.0f} | {r.connections:,.0f} | {r.entry_bytes / 1e3:,.1f} "
            f"| {r.rendezvous_s:.2f} | {r.round_s:.2f} | {r.peer_mb:.1f} | {r.cpu_s:.0f} "
            f"| {r.commit} |"
        )
    return lines


def body_table(rows: Sequence[Row]) -> list[str]:
    """Format reductions with bodies; bytes are in units of the encoded update, N."""
    cell_bytes = LENGTH.size + parse("int8").wire_bytes((BODY_VALUES,))
    lines = [
        "| peers | parts | reduction | connections of a peer | messages of a peer "
        "| reduction's bytes per peer, N | round, s | commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        sent = r.bytes_by_method["reduce"] / r.peers / (r.cells * cell_bytes)
        lines.append(
            f"| {r.peers} | {r.cells} | {r.reduction} | {r.connections:,.0f} "
            f"| {r.peer_messages:,.0f} | {sent:.2f} | {r.round_s:.2f} | {r.commit} |"
        )
    return lines


def known() -> list[Row]:
    """Return the saved rows."""
    return [Row(**row) for row in json.loads(SAVED.read_text())["rows"]] if SAVED.exists() else []


def save(new: Sequence[Row]) -> list[Row]:
    """Save new rows, replacing those of the same groups; return all."""
    counted = {key(row) for row in new}
    rows = [*(row for row in known() if key(row) not in counted), *new]
    rows.sort(key=key)
    SAVED.write_text(json.dumps(report(rows), indent=1) + "\n")
    put_between(PAGE, MARKS, table(rows))
    return rows


def key(row: Row) -> tuple[int, int, int, str]:
    """Return the key of a row's group; a new row replaces the saved row with the same key."""
    how = row.reduction if row.values == BODY_VALUES else ""
    return row.values, row.cells, row.peers, how


def report(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what --json prints."""
    return {
        "machine": machine(),
        "mbit_s": MBIT_S,
        "rtt_ms": 2e3 * LATENCY_S,
        "rows": [asdict(row) for row in rows],
    }


def in_a_process(num_peers: int, cells: int, reduction: str) -> Row:
    """Measure the group in a separate process, so that all of its memory is the group's."""
    words = [sys.executable, __file__, "--peers", str(num_peers), "--cells", str(cells), "--json"]
    words += ["--reduction", reduction, "--here"]
    out = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    return Row(**json.loads(out.splitlines()[-1])["rows"][0])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--peers", type=int, default=0, help="measure only a group of this many peers")
    add("--cells", type=int, default=64, help="parts of that group (default 64)")
    add(
        "--reduction",
        choices=("", "flat", "rows"),
        default="",
        help="include bodies, reduced this way",
    )
    add(
        "--here", action="store_true", help="count in this process instead of one process per group"
    )
    add("--rerun", action="store_true", help="count again")
    add("--save", action="store_true", help=f"save the rows in {SAVED.name} and {PAGE.name}")
    add("--json", action="store_true", help="print the rows as JSON on the last line")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    one = (options.peers, options.cells, options.reduction)
    groups = (one,) if options.peers else CONTROL + BODIES
    if options.here:
        rows = [measure(*group) for group in groups]
    elif options.rerun or not known():
        rows = [in_a_process(*group) for group in groups]
    else:
        rows = known()
    if options.save:
        rows = save(rows)
    print(table(rows))
    if options.json:
        print(json.dumps(report(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
