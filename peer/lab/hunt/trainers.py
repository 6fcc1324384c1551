"""A training loop in a thread of its own that takes turns with the event loop.

The trainer's side of a peer is written for a thread: it waits for the loop and for queues. Here it
has a thread, but never runs beside the loop: `Turns` lets the one run until it waits, then the
other. So a seed gives the same steps always, and waits take virtual time.

The model is a point that noise drives and a quadratic loss pulls to the peer's own target. What it
learns is kept twice (`audits.WorkAudit`): in the model, and as the sum of all steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from atoll.optim.methods.worker import Worker
from atoll.optim.reducer import Reducer
from atoll.optim.state.layout import Layout
from atoll.peer.daemon.peer import Peer
from atoll.peer.daemon.process import STORED_S, wait_until_stored
from atoll.peer.daemon.reducer import NetworkReducer, RunReducer
from atoll.peer.errors import SavedStateError
from atoll.peer.lab.hunt.audits import AuditedResidual, WorkAudit
from atoll.peer.lab.hunt.edges import here
from atoll.peer.training import saved
from atoll.peer.training.data.units import HeldUnits
from atoll.peer.training.watched import WatchedReducer

T = TypeVar("T")

TOKENS = 128  # of a step
RATE = 0.05  # of the inner optimizer
KIND = "hunted"  # of the saved state


class MachineEnded(BaseException):
    """The machine has died: its trainer's thread ends where it waits."""


class LoopTurns:
    """Lets a thread and the event loop run one at a time."""

    _here = threading.local()

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._go, self._stop = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._stop.acquire()
        self._asked: Callable[[], Coroutine[Any, Any, Any]] | None = None
        self._answer: Any = None
        self._failure: BaseException | None = None
        self._is_ended = self._is_over = False
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._run,), name="hunted-trainer", daemon=True
        )

    @classmethod
    def current(cls) -> LoopTurns | None:
        """Return the turns of this thread, if it has some."""
        return getattr(cls._here, "turns", None)

    # in the loop

    async def run(self) -> None:
        """Run the thread to its end; raise what it raised."""
        self._thread.start()
        try:
            self._turn()
            while not self._is_over:
                try:
                    assert self._asked is not None
                    self._answer, self._failure = await self._asked(), None
                except Exception as error:
                    self._answer, self._failure = None, error
                self._turn()
        finally:
            self._is_ended = True
            while not self._is_over:
                self._turn()
            self._thread.join()
        if self._failure is not None and not isinstance(self._failure, MachineEnded):
            raise self._failure

    def _turn(self) -> None:
        self._go.release()
        self._stop.acquire()

    # in the thread

    def wait(self, asked: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what a coroutine of the loop returns."""
        if self._is_ended:
            raise MachineEnded
        self._asked = asked
        self._stop.release()
        self._go.acquire()
        if self._is_ended:
            raise MachineEnded
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        answer: T = self._answer
        return answer

    def sleep(self, seconds: float) -> None:
        """Pause."""
        self.wait(lambda: asyncio.sleep(seconds))

    def _run(self) -> None:
        self._here.turns = self
        self._go.acquire()
        try:
            if not self._is_ended:
                self._work()
            self._failure = None
        except BaseException as error:
            self._failure = error
        finally:
            self._is_over = True
            self._stop.release()


class TurnQueue(Generic[T]):
    """A `queue.SimpleQueue` whose reader takes turns with the loop."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        """Add an item."""
        self._items.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def empty(self) -> bool:
        """Return whether there is nothing."""
        return not self._items

    def get(self, timeout: float | None = None) -> T:
        """Take the next item. Raises queue.Empty if there is none in time."""
        turns = LoopTurns.current()
        if not self._items and turns is not None:
            turns.wait(lambda: self._wait(timeout))
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    async def _wait(self, timeout_s: float | None) -> None:
        self._waiting = asyncio.get_running_loop().create_future()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._waiting


class TurnEvent(threading.Event):
    """An event for which a thread waits while the loop has its turn."""

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether it is set after a while; setting it does not end a wait."""
        turns = LoopTurns.current()
        if not self.is_set() and turns is not None and timeout is not None:
            turns.sleep(timeout)
        return self.is_set()


class TurnThread:
    """A `LoopThread` of a loop that takes turns with its trainer."""

    def __init__(self, peer: Peer) -> None:
        self.value = peer
        self.stopping = TurnEvent()
        self._loop = asyncio.get_running_loop()

    def ask(self, function: Callable[[], T]) -> T:
        """Call a function of the loop, which waits meanwhile."""
        return function()

    def run(self, coroutine: Coroutine[None, None, T], *, timeout_s: float) -> T:
        """Await a coroutine in the loop."""
        turns = LoopTurns.current()
        assert turns is not None, "only a trainer's thread waits for its loop"

        async def bounded() -> T:
            async with asyncio.timeout(timeout_s):
                return await coroutine

        return turns.wait(bounded)

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the loop, later."""
        self._loop.call_soon(function, *arguments)

    def close(self) -> None:
        """Do nothing: the machine ends the loop's side."""
        self.stopping.set()


class PointModel(nn.Module):
    """The model: one parameter for each name of a layout."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            owner: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, nn.Parameter(torch.zeros(shape)))


class Training:
    """One trainer, from its start until its machine ends."""

    def __init__(self, peer: Peer, step_s: float, seed: int) -> None:
        """Train at a pace; noise and target follow from the seed."""
        self._machine = machine = here()
        self._peer = peer
        self._step_s = step_s
        self._noise = torch.Generator().manual_seed(seed)
        self.audit = WorkAudit(machine)
        self._held = HeldUnits() if peer.spec.data.num_units else None
        """The units that this trainer holds; None in a run without `data.once`."""
        self.turns = LoopTurns(self._train)
        self.worker: Worker | None = None
        self._thread = TurnThread(peer)

    async def run(self) -> None:
        """Train until the run is complete or `stop`; raise what the trainer raises."""
        await self.turns.run()

    def stop(self) -> None:
        """End after the step in progress, as Ctrl-C does."""
        self._thread.stopping.set()

    def _train(self) -> None:
        reducer: RunReducer = self._peer.run.reducer(self._thread)  # type: ignore[arg-type]
        try:
            self._loop(reducer)
            if reducer.finished and not reducer.stopping.is_set():
                # As a trainer's process does: what the coordinator lacks is sent by heartbeats.
                tell = partial(self._machine.world.heard, self._machine)
                wait_until_stored(self._peer.run, STORED_S, reducer.stopping, tell)
        finally:
            reducer.stopping.set()

    def _loop(self, reducer: RunReducer) -> None:
        model = PointModel(self._machine.world.layout)
        inner = torch.optim.SGD(model.parameters(), lr=RATE)
        if isinstance(reducer, NetworkReducer):
            replay = self._peer.run.ctx.replay  # type: ignore[attr-defined]
            reducer.leave_residuals(lambda f: AuditedResidual(replay.residual(f), self.audit, f))
        steps = self._peer.spec.outer.inner_steps
        self.audit.watch(reducer, model)
        method, counted = reducer.method, self._counted(reducer)
        self.worker = worker = method.worker(model, inner, counted, inner_steps=steps)
        self.audit.begin(worker)
        self._resume(worker)
        targets = [torch.randn(p.shape, generator=self._noise) for p in model.parameters()]
        while not reducer.finished and not reducer.stopping.is_set():
            turns = LoopTurns.current()
            assert turns is not None
            turns.sleep(self._step_s)
            self._step(worker, model, targets)
            if self.audit.windows and self.audit.windows % 4 == 0 and worker.step_in_window == 0:
                self._save(worker)

    def _counted(self, reducer: RunReducer) -> Reducer:
        """Return the reducer as a worker has it that trains on units."""
        if self._held is None:
            return reducer
        return WatchedReducer(reducer, self._held.settle, done_units=self._held.hand_in)

    def _pass_step(self, worker: Worker) -> None:
        for parameter in worker.model.parameters():
            parameter.grad = None
        self.audit.step(worker, lambda: worker.advance(tokens=0))

    def _step(self, worker: Worker, model: nn.Module, targets: list[Tensor]) -> None:
        loss = 0.0
        if self._held is not None:
            if self._held.is_empty:
                self._pass_step(worker)
                return
            self._held.take()
        for parameter, target in zip(model.parameters(), targets, strict=True):
            distance = parameter.detach() - target
            parameter.grad = distance + 0.3 * torch.randn(target.shape, generator=self._noise)
            loss += float(distance.square().mean())
        self.audit.step(worker, lambda: worker.advance(tokens=TOKENS, loss=loss))

    @property
    def _path(self) -> Any:  # noqa: ANN401
        return self._machine.disk.folder / "trainer.safetensors"

    def _save(self, worker: Worker) -> None:
        with contextlib.suppress(OSError):  # a full disk: the state before stays
            tree = {"worker": worker.state_dict(), "audit": self.audit.state_dict()}
            if self._held is not None:
                tree["held"] = self._held.state_dict()
            saved.save(self._path, tree, kind=KIND, run="hunt")

    def _resume(self, worker: Worker) -> None:
        try:
            tree = saved.load(self._path, kind=KIND, run="hunt")
        except (SavedStateError, OSError):
            return
        stats = tree["worker"]["statistics"]
        self.audit.load_state_dict(tree["audit"], closed=stats["included"] + stats["left_out"])
        if self._held is not None:
            self._held.load_state_dict(tree["held"])
        worker.load_state_dict(tree["worker"])
        self.audit.resumed(worker)
