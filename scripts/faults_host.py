#!/usr/bin/env python3
"""One host of `scripts/bench_faults.py`: keeps reducing and reports events while faults strike.

    faults_host.py NAME '{"host": 0, "ips": ["11.77.0.1", ...], "params": 10000000, ...}'

Commands arrive as lines of JSON on stdin. Answers and events leave as lines of JSON on stdout:

    (start)                         -> {"hello": what the other hosts must know}
    {"meet": [hello of every host]} -> {"met": true}
    {"go": seconds}                 -> {"going": true}   atoll: windows of this length, without end
    {"round": k}                    -> {"going": true}   others: one reduction
    {"lie": true}                   -> {"lies": true}    sends NaN from now on
    {"die_at": "vote"}              -> {"armed": true}   SIGKILL to itself when the first vote on an
                                                         entry that it leads arrives, or "commit":
                                                         when it alone holds the certificate
    {"result": true}                -> {"sample": [...], "untouched": share, "finite": ...}  others

    {"event": "reduce", "position": p, "leader": PeerID, "at_s": t}
    {"event": "commit", "position": p, "kind": ..., "members": [PeerID], "cells": {PeerID: n}, ...}
    {"event": "said", "text": ..., "at_s": t}
    {"event": "ended", "position": k, "at_s": t, "failed": ...}     others: end of the reduction

Times are on CLOCK_MONOTONIC.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from allreduce_host import Facts, Host, Place, RoundsHost, vector

from atoll.optim.state.layout import CELL

Tell = Callable[[Facts], None]

SAMPLE_STEP = 10_007  # distance of the values that are compared
POLL_S = 0.002


class SteadyHost(RoundsHost):
    """A peer that submits one window after another, catches up, and reports events."""

    def __init__(self, place: Place, tell: Tell) -> None:
        super().__init__(place)
        self.tell = tell
        self.decided = asyncio.Event()
        self.lies = False
        self.die_at = ""

    async def meet(self, everyone: Sequence[Facts], told: Facts) -> None:
        await super().meet(everyone, told)
        self.node.on_restart = lambda: self._connect(everyone)

    def _build(self, everyone: Sequence[Facts]) -> None:
        from atoll.peer.recovery.recovery import Recovery
        from atoll.peer.recovery.sources import RosterSources

        super()._build(everyone)
        self.ctx.on_event = lambda level, text, key=None: self.tell(
            {"event": "said", "text": text, "at_s": time.monotonic()}
        )
        self.rounds._catch_up = self._catch_up
        self.recovery = Recovery(
            self.replica,
            RosterSources(self.ctx),
            genesis=self._genesis,
            stall_s=self.ctx.settings.stall_s,
            on_event=self.ctx.on_event,
            on_progress=lambda what, left: None,
        )
        self.call, self.node.transport.call = self.node.transport.call, self._watched_call

    async def _genesis(self) -> Any:
        from atoll.optim.state.outer_state import OuterState

        return OuterState.genesis(self.layout, torch.zeros(self.place.params))

    async def _catch_up(self) -> None:
        from atoll.optim.log.live_replica import RecoveryError

        with suppress(RecoveryError):
            await self.recovery.run()

    async def _connect(self, everyone: Sequence[Facts]) -> None:
        from atoll.dht.transport import TransportError

        for peer in everyone:
            if peer["peer_id"] != self.node.peer_id:
                with suppress(TransportError, TimeoutError):
                    await self.node.transport.connect(
                        peer["peer_id"], peer["addresses"], timeout_s=5.0
                    )

    async def _watched_call(self, peer: str, method: str, body: bytes, **options: Any) -> bytes:
        if method == "commit":
            self._die("commit")
        answer = await self.call(peer, method, body, **options)
        if method == "propose":
            self._die("vote")
        return answer

    def _die(self, moment: str) -> None:
        if self.die_at == moment:
            self.tell({"event": "dies", "at_s": time.monotonic()})
            os.kill(os.getpid(), signal.SIGKILL)

    async def go(self, window_s: float) -> None:
        """Submit window after window, always the same pseudo-gradient, encoded once."""
        from atoll.peer.rounds.engine import OfferedWindow

        offer, number = await self.compute(self.feedback.offer, self.delta_N, 1000.0), 0
        while True:
            await asyncio.sleep(window_s)
            number += 1
            self.decided.clear()
            window = OfferedWindow(
                number=number,
                offer=self._bad(offer) if self.lies else offer,
                tokens=10_000,
                steps=10,
                loss=2.0,
            )
            self.rounds.offer(window)
            await self.decided.wait()

    def _bad(self, offer: Any) -> Any:
        return replace(offer, frames=(self._nan(offer.frames[0]), *offer.frames[1:]))

    def _nan(self, frame: bytes) -> bytes:
        """A cell whose bits are all ones, which is NaN in every float, with a valid checksum."""
        from atoll.compression.base import HEADER_BYTES

        bad = bytearray(b"\xff" * len(frame))
        numel = min(CELL, self.place.params)
        bad[:HEADER_BYTES] = self.replay.method.codec._header((numel,), bad, len(bad))
        return bytes(bad)

    def _on_phase(self, phase: str, position: int) -> None:
        if phase == "reduce":
            self.tell(
                {
                    "event": "reduce",
                    "position": position,
                    "leader": self._leader(position),
                    "at_s": time.monotonic(),
                }
            )

    def _leader(self, position: int) -> str:
        from atoll.peer.rounds.consensus.ballots import leader_of

        return leader_of(self.replica.electorate, position, 0).peer_id

    def _on_settled(self, settled: Any) -> None:
        applied, entry = settled.applied, settled.applied.entry
        cells = {m.peer_id: 0 for m in entry.members}
        for part in entry.parts:
            cells[entry.members[part.owner].peer_id] += part.stop_cell - part.start_cell
        self.tell(
            {
                "event": "commit",
                "position": entry.position,
                "kind": entry.kind,
                "members": [m.peer_id for m in entry.complete_members()],
                "cells": cells,
                "chain": entry.chain.hex(),
                "at_s": time.monotonic() - applied.apply_s,
                "left_out": settled.trace.left_out if settled.trace else {},
            }
        )
        if settled.settles is not None:
            self.decided.set()


class RivalHost:
    """Another system's reduction in its own thread, so that a stuck one can be reported."""

    def __init__(self, name: str, place: Place, tell: Tell) -> None:
        import allreduce_rivals

        self.rivals = allreduce_rivals
        self.host: Host = allreduce_rivals.RIVALS[name](place)
        self.place, self.tell, self.number = place, tell, 0
        self.is_averager = name in ("hivemind", "hivemind-8bit")
        if name == "gloo":
            self._watch_gloo()

    async def hello(self) -> Facts:
        return await self.host.hello()

    async def meet(self, everyone: Sequence[Facts], told: Facts) -> None:
        await self.host.meet(everyone, told)

    def lie(self) -> None:
        nan_N = torch.full((self.place.params,), float("nan"))
        self.rivals.vector = lambda host, numel: nan_N.clone()

    def start_round(self, number: int) -> None:
        if self.is_averager:
            threading.Thread(target=self._watch_averager, daemon=True).start()
        threading.Thread(target=self._round, args=(number,), daemon=True).start()

    def _round(self, number: int) -> None:
        self.number, failed = number, None
        try:
            failed = asyncio.run(self.host.round(number)).get("failed")
        except Exception as error:
            failed = repr(error)[:200]
        self.tell(
            {"event": "ended", "position": number, "at_s": time.monotonic(), "failed": failed}
        )

    def _watch_gloo(self) -> None:
        reduce = torch.distributed.all_reduce

        def told(*args: Any, **options: Any) -> Any:
            self._say_reduce()
            return reduce(*args, **options)

        torch.distributed.all_reduce = told

    def _watch_averager(self) -> None:
        """Report when its process starts to reduce."""
        before_s = self.host.averager.times[0]
        while self.host.averager.times[0] == before_s:
            time.sleep(POLL_S)
        self._say_reduce()

    def _say_reduce(self) -> None:
        self.tell({"event": "reduce", "position": self.number, "at_s": time.monotonic()})

    def result(self) -> Facts:
        mean_N = self.host.mean_N()
        mine_N = vector(self.place.host, self.place.params)
        return {
            "sample": mean_N[::SAMPLE_STEP].tolist(),
            "untouched": float((mean_N == mine_N).float().mean()),
            "finite": bool(mean_N.isfinite().all()),
        }


async def obey(host: Any, ask: Facts, tasks: list[asyncio.Task[None]]) -> Facts:
    """Execute one command; return its answer."""
    if "meet" in ask:
        await host.meet(ask["meet"], ask)
        return {"met": True}
    if "go" in ask:
        tasks.append(asyncio.create_task(host.go(ask["go"])))
        return {"going": True}
    if "round" in ask:
        host.start_round(ask["round"])
        return {"going": True}
    if "die_at" in ask:
        host.die_at = ask["die_at"]
        return {"armed": True}
    if "lie" in ask:
        if isinstance(host, RivalHost):
            host.lie()
        else:
            host.lies = ask["lie"]
        return {"lies": ask["lie"]}
    return host.result()


async def serve(host: Any, tell: Tell) -> None:
    """Execute the commands on stdin until it ends."""
    loop, tasks = asyncio.get_running_loop(), []
    tell({"hello": await host.hello()})
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        tell(await obey(host, json.loads(line), tasks))


def main() -> None:
    torch.set_num_threads(1)
    answers, lock = os.fdopen(os.dup(1), "w", buffering=1), threading.Lock()
    os.dup2(2, 1)  # output of libraries must not mix with the answers

    def tell(facts: Facts) -> None:
        with lock, suppress(BrokenPipeError):
            answers.write(json.dumps(facts) + "\n")

    name, place = sys.argv[1], Place(**json.loads(sys.argv[2]))
    host = SteadyHost(place, tell) if name == "atoll" else RivalHost(name, place, tell)
    asyncio.run(serve(host, tell))
    os._exit(0)  # libraries' threads that never end must not keep the host alive


if __name__ == "__main__":
    main()
