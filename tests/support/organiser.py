"""A coordinator in a thread of this process, and what peers need to join it."""

import asyncio
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from atoll.coordinator.history import History
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import RunStatus
from atoll.coordinator.service.server import running
from atoll.optim.log.module import WHOLE
from atoll.optim.state.outer_state import OuterState
from atoll.peer.daemon.reach.bootstrap import BootstrapNode
from atoll.peer.training import opening
from atoll.peer.training.digests import read_tokenizer
from atoll.peer.training.permission import Allowed
from support.limits import DEADLINE_S
from support.status import make_round

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def tiny_spec(**sections) -> RunSpec:
    """Return a run of a model with one cell, of one peer by default."""
    values = {
        "run": {"name": "tiny", "rounds": 3},
        "model": {"overrides": {"dim": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 32}},
        "data": {"seq_len": 32},
        "inner": {"batch_size": 2, "warmup_steps": 2},
        "outer": {"inner_steps": 2},
        "round": {"min_peers": 1, "snapshot_every": 2, "stall_s": 3.0},
        "coordinator": {"listen": "127.0.0.1:0", "dht_listen": "127.0.0.1:0"},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return RunSpec.from_dict(values)


def first_state(spec: RunSpec, module: str = WHOLE) -> OuterState:
    allowed = Allowed.everything_in(spec)
    return opening.first_state(spec, allowed, module=module, own_loop=True)


@dataclass
class Organiser:
    """A coordinator of a spec; `up` holds it while it runs."""

    spec: RunSpec
    folder: object
    invite: object = None
    up: object = None
    _stop: object = None
    _loop: object = None
    _thread: object = None
    _failure: list = field(default_factory=list)

    def start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(DEADLINE_S), "the coordinator did not start"
        if self._failure:
            raise self._failure[0]

    def stop(self) -> None:
        if self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(DEADLINE_S)
        self._thread = None

    def status(self, module: str = "") -> RunStatus:
        async def ask() -> RunStatus:
            return self.up.coordinator.status(module)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(DEADLINE_S)

    def _run(self, ready: threading.Event) -> None:
        try:
            asyncio.run(self._serve(ready))
        except BaseException as error:
            self._failure.append(error)
        finally:
            ready.set()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with running(
            self.spec,
            partial(first_state, self.spec),
            self.folder,
            start_node=lambda request: BootstrapNode.start(request, admission_s=3600.0),
            tokenizer=lambda: read_tokenizer(self.spec),
        ) as self.up:
            self.invite = self.up.invite
            ready.set()
            await self._stop.wait()


def end_a_run(path: Path, spec: RunSpec, *, rounds: int) -> None:
    """Leave the directory of a coordinator that has ended and knows of so many rounds."""
    organiser = Organiser(spec, path)
    organiser.start()
    organiser.stop()
    with closing(History(path / "history.db")) as history:
        for position in range(1, rounds + 1):
            history.put_round(make_round(position, num_peers=3, left_out=[]))


def stand_on_one_log(organiser: Organiser, names=None) -> bool:
    """Whether peers, all by default, stand on the one log of their module as it was decided.

    False as long as the coordinator does not have it all.
    """
    logs = organiser.up.coordinator.logs
    peers = [peer for peer in organiser.status().peers if names is None or peer.name in names]
    records = [logs[peer.module].replica.store.get(peer.position - 1) for peer in peers]
    if not all(records):
        return False
    assert [peer.chain for peer in peers] == [record.chain.hex() for record in records]
    return True


def until(condition, what: str, timeout_s: float = DEADLINE_S):
    """Poll until the condition gives something true, and return that."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"expected {what} within {timeout_s:.0f} s")
