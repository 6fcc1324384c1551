"""Ranks of one peer: processes of a gloo group on this machine, which call one function each."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from support.forks import FORKS
from support.limits import DEADLINE_S


def on_ranks(
    world: int,
    function: Callable[..., object],
    *args: object,
    folder: Path,
    dying: tuple[int, ...] = (),
) -> None:
    """Call `function(*args)` on each rank of a group, and wait for all but those that are to die.

    Raises:
        AssertionError: with the traceback of the first rank that failed.
    """
    store = folder / "rendezvous"
    store.unlink(missing_ok=True)
    calls = [(_in_group, (rank, world, store, function, args)) for rank in range(world)]
    at_once(calls, num_dying=len(dying))


Call = tuple[Callable[..., object], tuple[object, ...]]


def at_once(calls: Sequence[Call], *, num_dying: int = 0) -> None:
    """Make each call in a process of its own, and wait for all but those that are to die.

    Raises:
        AssertionError: with the traceback of the first call that failed.
    """
    results = FORKS.Queue()
    processes = [
        FORKS.Process(target=_call, args=(number, results, *call))
        for number, call in enumerate(calls)
    ]
    for process in processes:
        process.start()
    try:
        for _ in range(len(calls) - num_dying):
            number, error = results.get(timeout=DEADLINE_S)
            assert error is None, f"rank {number}: {error}"
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _call(
    number: int,
    results: "multiprocessing.Queue[tuple[int, str | None]]",
    function: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        function(*args)
        results.put((number, None))
    except BaseException:
        results.put((number, traceback.format_exc()))
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _in_group(
    rank: int,
    world: int,
    store: Path,
    function: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    function(*args)
