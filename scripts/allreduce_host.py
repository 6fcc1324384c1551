#!/usr/bin/env python3
"""One host of `scripts/bench_allreduce.py`: takes part in all-reduces on command.

    allreduce_host.py NAME '{"host": 0, "ips": ["11.77.0.1", ...], "params": 10000000, ...}'

Commands arrive as lines of JSON on stdin, answers leave as lines of JSON on stdout:

    (start)                                -> {"hello": what the other hosts must know}
    {"meet": [hello of every host], ...}   -> {"met": true}
    {"round": k}                           -> {"started_s": t, "ended_s": t, ...}
    {"count": true}                        -> {"wire_sent": bytes, ...}
    {"result": true}                       -> {"error": e, "digest": hex, ...}

Times are on CLOCK_MONOTONIC, which all processes of one machine share.
"""

import asyncio
import hashlib
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The number of this host, the addresses of all hosts, and what they reduce."""

    host: int
    ips: list[str]
    params: int
    codec: str
    mbit_s: list[float]
    """uplink of each host, for systems that pace by a setting; atoll does not read it"""

    @property
    def ip(self) -> str:
        return self.ips[self.host]

    @property
    def hosts(self) -> int:
        return len(self.ips)


class Host(Protocol):
    """A system that reduces."""

    async def hello(self) -> Facts: ...

    async def meet(self, everyone: Sequence[Facts], told: Facts) -> None: ...

    async def round(self, number: int) -> Facts: ...

    def mean_N(self) -> Tensor: ...  # noqa: N802

    def facts(self) -> Facts: ...

    async def close(self) -> None: ...


def vector(host: int, numel: int) -> Tensor:
    """Return a host's contribution, with the bulk and tails of a pseudo-gradient."""
    generator = torch.Generator().manual_seed(host)
    x_N = torch.randn(numel, generator=generator)
    return x_N.mul_(torch.rand(numel, generator=generator).add_(0.1)).mul_(0.01)


def relative_error(mean_N: Tensor, hosts: int) -> float:
    """Return the Euclidean distance to the exact mean, relative to the mean's length."""
    exact_N = torch.zeros_like(mean_N)
    for host in range(hosts):
        exact_N += vector(host, mean_N.numel())
    exact_N /= hosts
    return float((mean_N - exact_N).norm() / exact_N.norm())


class RoundsHost:
    """A peer as in a run (p2pd, log and rounds engine) without the trainer."""

    def __init__(self, place: Place) -> None:
        from atoll.optim.log.replay import Replay
        from atoll.optim.methods import parse
        from atoll.optim.reduction.contribution import Feedback
        from atoll.optim.state.layout import Layout

        self.place = place
        self.layout = Layout(names=("w",), shapes=((place.params,),))
        self.replay = Replay(parse("diloco", codec=place.codec), self.layout)
        self.feedback = Feedback(place.params, self.replay.method.codec, beta=0.0)
        self.delta_N = vector(place.host, place.params)
        self.sign = 1.0
        self.folder = tempfile.TemporaryDirectory(prefix="atoll-bench-")
        self.work = ThreadPoolExecutor(2, thread_name_prefix="atoll-work")
        self.settled: asyncio.Queue[Facts] = asyncio.Queue()
        self.started_s = 0.0

    async def compute(self, function: Any, /, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.work, function, *args)

    async def hello(self) -> Facts:
        from atoll.dht.node import Node

        self.node = await Node.start(
            None, run_id="bench", listen_maddrs=(f"/ip4/{self.place.ip}/tcp/4001",)
        )
        self.incarnation = f"{random.SystemRandom().getrandbits(128):032x}"
        return {
            "peer_id": self.node.peer_id,
            "incarnation": self.incarnation,
            "addresses": self.node.addresses,
        }

    async def meet(self, everyone: Sequence[Facts], told: Facts) -> None:
        from atoll.dht.identity import verify
        from atoll.optim.log.entry import genesis_chain
        from atoll.optim.log.live_replica import LiveReplica
        from atoll.optim.log.module import Module
        from atoll.optim.log.replica import Replica
        from atoll.optim.log.store import LogStore
        from atoll.optim.state.outer_state import OuterState

        run_id = bytes.fromhex(told["run_id"])
        genesis = OuterState.genesis(self.layout, torch.zeros(self.place.params))
        chain = genesis_chain(run_id, bytes.fromhex(told["root"]))
        module = Module(
            run_id=run_id, method=self.replay.method, layout=self.layout, snapshot_every=10**6
        )
        store = LogStore(
            Path(self.folder.name),
            run_id=run_id,
            genesis_chain=chain,
            body_budget_bytes=10**9,
            keep_snapshots=3,
        )
        core = Replica(
            module,
            store,
            verify=verify,
            verify_run=lambda data, signature: verify(told["organiser"], data, signature),
        )
        self.replica = LiveReplica(core, compute=self.compute)
        self._build(everyone)
        await self.replica.install(genesis)
        await self.replica.adopt(bytes.fromhex(told["epoch"]))
        others = [peer for peer in everyone if peer["peer_id"] != self.node.peer_id]
        for peer in others:
            self.node.transport.learn(peer["peer_id"], peer["addresses"])
        await asyncio.gather(
            *(
                self.node.transport.connect(p["peer_id"], p["addresses"], timeout_s=20.0)
                for p in others
            )
        )
        self.task = asyncio.create_task(self.rounds.run())

    def _build(self, everyone: Sequence[Facts]) -> None:
        from atoll.dht.identity import verify
        from atoll.optim.log.entry import Elector
        from atoll.peer.rounds.context import Context, RoundSettings
        from atoll.peer.rounds.engine import Rounds

        async def catch_up() -> None:
            return None

        self.ctx = Context(
            me=Elector(peer_id=self.node.peer_id, incarnation=self.incarnation),
            sign=self.node.identity.sign,
            verify=verify,
            transport=self.node.transport,
            roster=board_of(everyone).roster(self.node.peer_id),
            replica=self.replica,
            replay=self.replay,
            scalars=lambda position: (1.0, 0.0),
            settings=RoundSettings(stall_s=1.5, grace_s=5.0),
            compute=self.compute,
            on_event=lambda level, text, key=None: print(f"{level}: {text}", file=sys.stderr),
            ready_in_s=lambda: 0.0,
        )
        self.rounds = Rounds(
            self.ctx,
            catch_up=catch_up,
            on_settled=self._on_settled,
            on_phase=self._on_phase,
            on_led=lambda entry, certificate, body: None,
        )
        self.rounds.serve()

    def _on_phase(self, phase: str, position: int) -> None:
        if phase == "reduce":
            self.started_s = time.monotonic()

    def _on_settled(self, settled: Any) -> None:
        now_s = time.monotonic()
        applied = settled.applied
        self.settled.put_nowait(
            {
                "kind": applied.entry.kind,
                "started_s": self.started_s,
                "ended_s": now_s - applied.apply_s,
                "applied_s": now_s,
                "members": len(applied.entry.members),
                "trace": asdict(settled.trace) if settled.trace else {},
            }
        )

    async def round(self, number: int) -> Facts:
        from atoll.peer.rounds.engine import OfferedWindow

        self.sign = -self.sign  # a part equal to one that the receiver holds would arrive at once
        self.delta_N.neg_()
        began_s = time.monotonic()
        offer = await self.compute(self.feedback.offer, self.delta_N, 1000.0)
        encode_s = time.monotonic() - began_s
        offered_s = time.monotonic()
        self.rounds.offer(
            OfferedWindow(number=number, offer=offer, tokens=10_000, steps=10, loss=2.0)
        )
        facts = await self.settled.get()
        link = self.ctx.link
        return facts | {
            "encode_s": encode_s,
            "offered_s": offered_s,
            "pace": link.pacer.rate_mbit_s,
            "up": link.uplink_mbit_s,
        }

    def mean_N(self) -> Tensor:  # noqa: N802
        from atoll.optim.log.entry import Entry

        store, last = self.replica.store, self.replica.position - 1
        entry = Entry.decode(store.headers(last, 1)[0].entry)
        return self.replay.decode(entry, store.body(last)) * self.sign

    def facts(self) -> Facts:
        wire = self.node.wire_totals()
        return {
            **({"wire_sent": wire.packet_sent} if wire else {}),
            "chain": self.replica.chain.hex(),
            "root": self.replica.state.root().hex(),
        }

    async def close(self) -> None:
        from atoll.dht.tasks import end

        await end(self.task)
        await self.rounds.close()
        await self.node.close()
        self.replica.store.close()
        self.work.shutdown(wait=False, cancel_futures=True)
        self.folder.cleanup()


def board_of(everyone: Sequence[Facts]) -> Any:
    """Return a board that shows all hosts from the start, for as long as they run."""
    from atoll.dht.roster import PeerRecord
    from atoll.dht.testing.roster import MemoryBoard

    board = MemoryBoard()
    for peer in everyone:
        board.records[peer["peer_id"]] = PeerRecord(
            peer_id=peer["peer_id"],
            addresses=tuple(peer["addresses"]),
            incarnation=peer["incarnation"],
            role="trainer",
            epoch=1,
            position=0,
            tokens_per_s=0.0,
            uplink_mbit_s=0.0,
            downlink_mbit_s=0.0,
            ready_in_s=0.0,
            protocol=1,
            expires_at=math.inf,
        )
    return board


async def serve(host: Host, place: Place) -> None:
    """Execute the commands on stdin until it ends."""
    loop = asyncio.get_running_loop()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the answers

    def tell(answer: Facts) -> None:
        answers.write(json.dumps(answer) + "\n")

    tell({"hello": await host.hello()})
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        ask = json.loads(line)
        if "meet" in ask:
            await host.meet(ask["meet"], ask)
            tell({"met": True})
        elif "round" in ask:
            tell(await host.round(ask["round"]))
        elif "count" in ask:
            tell(host.facts())
        else:
            mean_N = host.mean_N()
            digest = hashlib.sha256(mean_N.numpy().tobytes()).hexdigest()
            error = relative_error(mean_N, place.hosts)
            tell({"error": error, "digest": digest, **host.facts()})
    with suppress(TimeoutError):
        async with asyncio.timeout(5):
            await host.close()


def main() -> None:
    torch.set_num_threads(1)
    name, place = sys.argv[1], Place(**json.loads(sys.argv[2]))
    if name == "atoll":
        host: Host = RoundsHost(place)
    else:
        import allreduce_rivals

        host = allreduce_rivals.RIVALS[name](place)
    asyncio.run(serve(host, place))
    os._exit(0)  # libraries' threads that never end must not keep the host alive


if __name__ == "__main__":
    main()
