"""Ranks of one peer: processes of a gloo group on this machine, which call one function each."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

TIMEOUT_S = 120.0  # of all ranks together; a machine that is busy elsewhere is slow

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__, "atoll.optim.ranks", "torch.distributed.fsdp"])


def on_ranks(
    world: int,
    function: Callable[..., object],
    *args: object,
    folder: Path,
    dying: tuple[int, ...] = (),
) -> None:
    """Call `function(*args)` on each rank, and wait for all but those that are to die.

    Raises:
        AssertionError: with the traceback of the first rank that failed.
    """
    results = _context.Queue()
    processes = [
        _context.Process(
            target=_call, args=(rank, world, folder / "rendezvous", results, function, args)
        )
        for rank in range(world)
    ]
    (folder / "rendezvous").unlink(missing_ok=True)
    for process in processes:
        process.start()
    try:
        for _ in range(world - len(dying)):
            rank, error = results.get(timeout=TIMEOUT_S)
            assert error is None, f"rank {rank}: {error}"
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _call(
    rank: int,
    world: int,
    store: Path,
    results: "multiprocessing.Queue[tuple[int, str | None]]",
    function: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
        function(*args)
        results.put((rank, None))
    except BaseException:
        results.put((rank, traceback.format_exc()))
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
