"""Pieces of a round alone in this process: their time on one thread and on two, and their memory.

One piece after another, each with only the vectors that it needs, in inference mode as a peer runs
them. Each takes turns with a copy by torch on as many threads. All are timed once more beside
threads that have called torch, as a peer's are: libgomp then counts more threads than processors,
and lets those that wait for the next call sleep.
"""

import argparse
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.log.replay import Replay
from atoll.optim.state import vectors
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.peer.lab.advice import as_run

REPEATS = 9
WEIGHT = 3.0  # of a contribution: by 1, a product might be saved
THREADS = (1, 2)
OTHERS = 3  # threads beside: of a peer, at least apply, reduction and the settling of a round
NOISE = 1 << 24  # values drawn; longer vectors repeat them, since a billion draws take 10 s
COPIED = 50_000_000  # values: no cache holds them, and two such vectors take 0.4 GB

Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One pass over a state."""

    work: Callable[[], object]
    before: Callable[[], object] = lambda: None
    """is not timed"""
    read_bytes: int
    """a parameter"""
    written_bytes: int


def all_pieces(params: str, options: argparse.Namespace) -> list[Facts]:
    """Time the pieces at several numbers of parameters, in a thread of their own.

    Scratch memory that a thread makes in inference mode is of no use to it outside.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_all_pieces, params, options).result()


def _all_pieces(params: str, options: argparse.Namespace) -> list[Facts]:
    method = RunSpec.from_dict(as_run(options.method, options.inner_steps)).method()
    rows = list[Facts]()
    with torch.inference_mode():
        for numel in map(int, params.split(",")):
            replay = Replay(method, Layout(names=("w",), shapes=((numel,),)))
            for name, make in MAKERS.items():
                rows += timed(name, make, replay)
            with others():
                for name, make in MAKERS.items():
                    rows += timed(f"{name}, beside", make, replay)
    return rows


@contextmanager
def others() -> Iterator[None]:
    """Keep threads beside this one, each of which has called torch on several threads."""
    met = threading.Barrier(OTHERS + 1)

    def call() -> None:
        torch.set_num_threads(max(THREADS))
        torch.ones(NOISE).add_(1.0)
        met.wait()

    with ThreadPoolExecutor(OTHERS) as threads:
        calls = [threads.submit(call) for _ in range(OTHERS)]
        met.wait()
        for each in calls:
            each.result()
        yield


def timed(name: str, make: Callable[[Replay], Piece], replay: Replay) -> list[Facts]:
    """Return a row for each number of threads."""
    torch.manual_seed(0)
    params = replay.layout.numel
    copied = min(params, COPIED)
    old_N, new_N = noise(copied), noise(copied)
    copy = Piece(work=lambda: old_N.copy_(new_N), read_bytes=4, written_bytes=4)
    before_bytes = forget_peak()
    piece, rows = make(replay), list[Facts]()
    for threads in THREADS:
        torch.set_num_threads(threads)
        clock = time.thread_time if threads == 1 else time.perf_counter
        seconds, copy_s = fastest_s([piece, copy], clock)
        ns, copy_ns = 1e9 * seconds / params, 1e9 * copy_s / copied
        moved_bytes = piece.read_bytes + piece.written_bytes
        rows.append(
            {
                "params": params,
                "threads": threads,
                "piece": name,
                "ns_per_param": ns,
                "copies": ns / (copy_ns * piece.read_bytes / 4),
                "copies_moved": ns / (copy_ns * moved_bytes / 8),
            }
        )
    held_bytes = peak_bytes() - before_bytes
    return [row | {"held_per_param": held_bytes / params} for row in rows]


def apply_piece(replay: Replay) -> Piece:
    """Apply an update, as a peer's replica does: over the momentum and the update."""
    state = state_of(replay)
    update_N = noise(replay.layout.numel)

    def apply() -> None:
        replaced = OuterState(
            layout=replay.layout, position=0, params_N=state.params_N, memory_M=state.memory_M
        )
        replaced.give_way(params=False)
        replay.method.apply(replaced, update_N, fragment=replay.fragments[0], lr=0.7, momentum=0.9)

    return Piece(
        work=apply,
        before=lambda: update_N.copy_(state.params_N),  # the next parameters took its place
        read_bytes=12,
        written_bytes=8,
    )


def root_piece(replay: Replay) -> Piece:
    """Hash a state."""
    state = state_of(replay)
    return Piece(work=lambda: state.at(1).root(), read_bytes=8, written_bytes=0)


def residual_piece(replay: Replay) -> Piece:
    """Encode a contribution with its residual, and settle it."""
    change_N, feedback = noise(replay.layout.numel), replay.residual(0)
    included = torch.ones(len(replay.fragments[0].pieces), dtype=torch.bool)

    def residual() -> None:
        offer = feedback.offer(change_N, weight=WEIGHT)
        feedback.settle(offer, included, weight=WEIGHT)

    return Piece(work=residual, read_bytes=8, written_bytes=5)


MAKERS: dict[str, Callable[[Replay], Piece]] = {
    "apply": apply_piece,
    "root": root_piece,
    "residual": residual_piece,
}


def state_of(replay: Replay) -> OuterState:
    """Return a state of noise, whose momentum is 0."""
    memory_M = torch.zeros(replay.memory_numel) if replay.memory_numel else None
    return OuterState.genesis(replay.layout, noise(replay.layout.numel), memory_M)


def noise(numel: int) -> Tensor:
    """Return a vector of noise."""
    values_N, some = vectors.empty(numel), torch.randn(min(numel, NOISE))
    for run in torch.split(values_N, NOISE):
        run.copy_(some[: len(run)])
    return values_N


def fastest_s(works: Sequence[Piece], clock: Callable[[], float]) -> list[float]:
    """Return the least seconds of each, in turn; other programs disturb some of the repeats."""
    best = [math.inf] * len(works)
    for _ in range(REPEATS):
        for index, piece in enumerate(works):
            piece.before()
            began_s = clock()
            piece.work()
            best[index] = min(best[index], clock() - began_s)
    return best


def forget_peak() -> int:
    """Give back what waits to be used again, and count the peak from here on; return memory now."""
    vectors.release()
    vectors.trim(vectors.LONG)
    Path("/proc/self/clear_refs").write_text("5")
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """Return the largest resident memory since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def piece_table(rows: list[Facts]) -> list[str]:
    """Format the rows of pieces."""
    lines = [
        f"{'params':>13} {'threads':>8} {'piece':18}{'ns/param':>10}{'x copy of read':>16}"
        f"{'of read + written':>19}{'B/param held':>14}"
    ]
    for row in (r for r in rows if "piece" in r):
        held = row.get("held_per_param", math.nan)  # rows saved before had none
        lines.append(
            f"{row['params']:13,} {row['threads']:8} {row['piece']:18}{row['ns_per_param']:10.2f}"
            f"{row['copies']:16.2f}{row['copies_moved']:19.2f}{held:14.1f}"
        )
    return lines
