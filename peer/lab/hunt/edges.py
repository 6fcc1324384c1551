"""Clocks, chance and threads of a process, replaced while a simulation runs.

Everything else in a simulated process is the code that peers and coordinators run. Replaced are:

    time        `time.time`, `monotonic` and `perf_counter`: the loop's clock, and a machine's error
    chance      `random`, `os.urandom`, new incarnations and keys: drawn from the seed
    threads     executors run in the loop, later; the trainer takes turns with it (`trainers`)
    disk        SQLite's connections, `fsync` and `replace`: counted by a machine's disk (`disks`)
    network     p2pd and the DHT (`nodes`), gRPC (`wires`), the kernel's counters
    signatures  verified once: all peers of a simulation verify the same ones

`MACHINE` says on which machine code runs; tasks inherit it.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import sys
import time
import types
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from atoll.dht import clock
from atoll.dht.testing.virtualtime import VirtualTimeLoop

P = ParamSpec("P")
T = TypeVar("T")

Machine = Any
"""A `machines.Machine`, whose module imports this one."""

BEGAN_S = 1.7e9  # seconds since 1970 when a simulation begins

MACHINE: ContextVar[Machine | None] = ContextVar("machine", default=None)
"""The machine on which the running code is."""

START: ContextVar[int] = ContextVar("start", default=0)
"""The number of the machine's start to which the running code belongs."""


def living() -> Machine:
    """Return the machine of the running code; None if its process has been killed."""
    machine = MACHINE.get()
    is_current = machine is not None and machine.is_up and machine.num_starts == START.get()
    return machine if is_current else None


def here() -> Machine:
    """Return the machine of the running code."""
    machine = MACHINE.get()
    assert machine is not None, "expected to run on a machine of a simulation"
    return machine


class HuntLoop(VirtualTimeLoop):
    """Runs jobs of executors itself, after and before pauses of virtual time.

    So a job takes a while, as in a thread: others run meanwhile, and in an order that the seed
    gives. A job of a machine that has died never runs.
    """

    longest_job_s = 0.0

    def run_in_executor(  # type: ignore[override]
        self,
        executor: Executor | None,
        func: Callable[..., T],
        *args: Any,  # noqa: ANN401
    ) -> asyncio.Future[T]:
        """Return the result that the job will have."""
        machine, future = MACHINE.get(), self.create_future()
        if machine is None:
            _settle(future, func, args)
            return future
        drawn = machine.chance.random()
        pause_s = self.longest_job_s * drawn * drawn

        def work() -> None:
            if living() is None:
                future.cancel()
            elif not future.done():
                done = self.create_future()
                _settle(done, func, args)
                self.call_later(pause_s / 5, _pass_on, done, future)

        self.call_later(pause_s, work)
        return future


def _settle(future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        future.set_result(func(*args))
    except Exception as error:
        future.set_exception(error)


def _pass_on(done: asyncio.Future[Any], future: asyncio.Future[Any]) -> None:
    failure = done.exception()  # read, or asyncio would log it as lost
    if future.done():
        return
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(done.result())


class InlineExecutor(Executor):
    """Runs each job at once, in the thread that hands it in."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Return the finished job."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class NoCounter:
    """A `WireCounter` of a process without sockets."""

    def __init__(self, pids: object) -> None:
        """Count nothing."""

    def totals(self) -> None:
        """Return that the kernel reports nothing."""


class KnownSignatures:
    """Stands for `Ed25519PublicKey`, and remembers what it has verified."""

    def __init__(self) -> None:
        """Know no signature."""
        self._known: dict[tuple[bytes, bytes, bytes], bool] = {}

    def from_public_bytes(self, key: bytes) -> _KnownKey:
        """Return a public key."""
        return _KnownKey(key, self._known)


@dataclass(frozen=True)
class _KnownKey:
    key: bytes
    known: dict[tuple[bytes, bytes, bytes], bool]

    def verify(self, signature: bytes, data: bytes) -> None:
        """Raise InvalidSignature unless the key's owner signed the data."""
        asked = self.key, signature, data
        holds = self.known.get(asked)
        if holds is None:
            try:
                Ed25519PublicKey.from_public_bytes(self.key).verify(signature, data)
                holds = True
            except InvalidSignature:
                holds = False
            self.known[asked] = holds
        if not holds:
            raise InvalidSignature


class Edges:
    """The replaced functions of one simulation."""

    def __init__(self, loop: HuntLoop, seed: int) -> None:
        """Draw from a seed what the system would give by chance."""
        self._loop = loop
        self._chance = random.Random(f"system {seed}")
        self._real_connect = sqlite3.connect
        self._real_fsync, self._real_replace = os.fsync, os.replace

    def steady_s(self) -> float:
        """Return the loop's time."""
        return self._loop.time()

    def wall_s(self) -> float:
        """Return seconds since 1970 by the clock of the machine."""
        machine = MACHINE.get()
        return BEGAN_S + self._loop.time() + (machine.clock_error_s if machine else 0.0)

    def run_clock_s(self) -> float:
        """Return seconds since 1970 by the run's clock, as the machine knows it."""
        machine = MACHINE.get()
        return self.wall_s() + (machine.clock_offset_s if machine else 0.0)

    def follow(self, offset_s: float, error_s: float) -> None:
        """Take over how far the run's clock is ahead of the machine's, if that has jumped."""
        machine = living()
        jump_s = clock.JUMP_S + error_s
        if machine is not None and abs(offset_s - machine.clock_offset_s) > jump_s:
            machine.clock_offset_s = offset_s

    def urandom(self, count: int) -> bytes:
        """Return bytes from the seed."""
        return self._chance.randbytes(count)

    def token_hex(self, count: int) -> str:
        """Return that many bytes from the seed, as `secrets` does."""
        return self.urandom(count).hex()

    def randbelow(self, limit: int) -> int:
        """Return a number from the seed."""
        return self._chance.randrange(limit)

    def incarnation(self) -> str:
        """Return what tells one start of an elector from all others."""
        return f"{self._chance.getrandbits(128):032x}"

    def connect(self, path: Path, **options: Any) -> sqlite3.Connection:  # noqa: ANN401
        """Open a database on the machine's disk."""
        machine = living()
        if machine is None:
            opened: sqlite3.Connection = self._real_connect(path, **options)
            return opened
        counted: sqlite3.Connection = machine.disk.connect(self._real_connect, path, **options)
        return counted

    def fsync(self, descriptor: int) -> None:
        """Note that a file, or a folder, is on the machine's disk."""
        machine = living()
        if machine is not None:
            machine.disk.fsync(descriptor)

    def replace(self, source: Path, target: Path, **_: Any) -> None:  # noqa: ANN401
        """Rename a file on the machine's disk."""
        machine = living()
        if machine is not None:
            machine.disk.before_replace(target)
        self._real_replace(source, target)
        if machine is not None:
            machine.disk.replaced(target)


@contextmanager
def replaced(edges: Edges, places: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace what a process gets from its system inside the block.

    Args:
        edges: of the simulation.
        places: further `(object, attribute, replacement)`.
    """
    clocks = {
        time.time: edges.wall_s,
        time.monotonic: edges.steady_s,
        time.perf_counter: edges.steady_s,
    }
    with ExitStack() as stack:
        chance = random.getstate()
        stack.callback(random.setstate, chance)
        random.seed(edges.incarnation())
        for function, defaults in _defaults_with(clocks):
            stack.callback(_set_defaults, function, *defaults)
            _set_defaults(function, *_with_clocks(defaults, clocks))
        everything = [
            (time, "time", edges.wall_s),
            (time, "monotonic", edges.steady_s),
            (time, "perf_counter", edges.steady_s),
            (os, "urandom", edges.urandom),
            (os, "fsync", edges.fsync),
            (os, "replace", edges.replace),
            (sqlite3, "connect", edges.connect),
            *places,
        ]
        for owner, name, replacement in everything:
            before = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
            stack.callback(setattr, owner, name, before)
            setattr(owner, name, replacement)
        yield


_Defaults = tuple[tuple[Any, ...] | None, dict[str, Any] | None]


def _defaults_with(clocks: dict[Any, Any]) -> list[tuple[types.FunctionType, _Defaults]]:
    """Return the functions of Atoll whose defaults hold a clock, which they got when imported."""
    modules = tuple(sorted(name for name in sys.modules if name.startswith("atoll.")))
    return [
        (function, (function.__defaults__, function.__kwdefaults__))
        for function in _functions_with(tuple(clocks), modules)
    ]


@cache
def _functions_with(
    clocks: tuple[Any, ...], modules: tuple[str, ...]
) -> tuple[types.FunctionType, ...]:
    found: dict[int, types.FunctionType] = {}
    for name in modules:
        for value in list(vars(sys.modules[name]).values()):
            for function in _functions_of(value):
                found[id(function)] = function
    return tuple(
        function
        for function in found.values()
        if any(_is_clock(each, clocks) for each in _all_defaults(function))
    )


def _functions_of(value: object) -> Iterator[types.FunctionType]:
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, type) and value.__module__.startswith("atoll."):
        for member in list(vars(value).values()):
            if isinstance(member, types.FunctionType):
                yield member


def _all_defaults(function: types.FunctionType) -> list[Any]:
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _is_clock(value: object, clocks: Collection[Any]) -> bool:
    return isinstance(value, types.BuiltinFunctionType) and value in clocks


def _with_clocks(defaults: _Defaults, clocks: dict[Any, Any]) -> _Defaults:
    def swap(value: object) -> object:
        return clocks[value] if _is_clock(value, clocks) else value

    positional, by_name = defaults
    return (
        None if positional is None else tuple(map(swap, positional)),
        None if by_name is None else {name: swap(value) for name, value in by_name.items()},
    )


def _set_defaults(
    function: types.FunctionType,
    positional: tuple[Any, ...] | None,
    by_name: dict[str, Any] | None,
) -> None:
    function.__defaults__ = positional
    function.__kwdefaults__ = by_name
