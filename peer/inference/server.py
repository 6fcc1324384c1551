"""Answers the questions of clients: the machine of sessions, a thread that computes, and the log.

Computations run one after another in a thread of low priority beside the trainer's. They may take a
share of the time that the peer's owner has named, with bursts of a second: between two of them the
thread rests. So training goes on, and a short text is not slowed down.

A computation goes on if its client has gone: it asks again, and finds the answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import KeptTasks
from atoll.dht.transport import Refused, Transport
from atoll.optim.log.entry import MalformedRecord
from atoll.optim.log.live_replica import Compute
from atoll.peer.inference.messages import TEXT, Extend, expect_length, unpack
from atoll.peer.inference.served import BadPayload, ServedStage
from atoll.peer.inference.sessions import (
    ComputeText,
    SessionRules,
    Sessions,
    TextSession,
    TextStatistics,
)

BURST_S = 1.0  # of computing in a row, before a server begins to rest
TICK_S = 1.0  # sessions are idle for tens of seconds before they end

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TimeShare:
    """A share of the time, to be spent in bursts."""

    share: float
    """above 0, up to 1"""
    burst_s: float = BURST_S
    _left_s: float = BURST_S
    _at_s: float | None = None

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until something may be computed again."""
        self.spend(0.0, now_s)
        return 0.0 if self._left_s >= 0 else -self._left_s / self.share

    def spend(self, took_s: float, now_s: float) -> None:
        """Note a computation that has ended."""
        since_s = now_s - (now_s if self._at_s is None else self._at_s)
        self._left_s = min(self.burst_s, self._left_s + since_s * self.share - took_s)
        self._at_s = now_s


StandsAt = Callable[[], tuple[int, Tensor]]
"""Returns the position of the stage's log, and its parameters there, which nobody changes later."""


class TextServer:
    """One stage, served to clients."""

    def __init__(
        self,
        stage: ServedStage,
        stands_at: StandsAt,
        transport: Transport,
        *,
        share: float,
        tasks: KeptTasks,
        compute: Compute,
        rules: SessionRules | None = None,
    ) -> None:
        """Serve from now on.

        Args:
            stage: computes.
            stands_at: returns where the stage's log stands.
            transport: of the stage's module.
            share: of the time that computing may take.
            tasks: own what this computes.
            compute: runs one computation at a time, beside the loop.
            rules: what it gives to texts.
        """
        self._stage, self._stands_at, self._compute = stage, stands_at, compute
        self._sessions = Sessions(
            rules=rules or SessionRules(shape=stage.shape, cache_bytes=stage.cache_bytes)
        )
        self._shape = self._sessions.rules.shape
        self._time = TimeShare(share=share)
        self._turn = asyncio.Lock()
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._params: dict[int, Tensor] = {}
        """that sessions read, by position; none once they have ended"""
        self._waiting: dict[TextSession, asyncio.Future[bytes]] = {}
        transport.serve(TEXT, self._serve)
        tasks.keep(self._keep)

    def statistics(self) -> TextStatistics:
        """Return what is held, and what was done."""
        return self._sessions.statistics()

    async def _keep(self) -> None:
        while True:
            self._sessions.tick(here=self._stands_at()[0], now_s=self._loop.time())
            self._let_go()
            await asyncio.sleep(TICK_S)

    async def _serve(self, client: str, body: bytes) -> bytes:
        question, payload = self._read(body)
        here, params_N = self._stands_at()
        # Hashing a piece takes less than the hand-over to a thread.
        digest = hashlib.sha256(payload).digest()
        verdict = self._sessions.asked(client, question, digest, here=here, now_s=self._loop.time())
        if isinstance(verdict, bytes):
            return verdict
        session = verdict.session
        if isinstance(verdict, ComputeText):
            # Those of another position are there: a session reads them.
            params_N = self._params.setdefault(session.position, params_N)
            self._waiting[session] = self._loop.create_future()
            self._tasks.spawn(self._work, verdict, params_N, payload)
        self._let_go()
        return await asyncio.shield(self._waiting[session])

    def _read(self, body: bytes) -> tuple[Extend, memoryview]:
        try:
            question, payload = unpack(Extend, body)
            expect_length(payload, self._shape.input_bytes(question.rows))
        except MalformedRecord as error:
            raise Refused(RefusalCode.BAD_MESSAGE, str(error)) from error
        return question, payload

    async def _work(self, job: ComputeText, params_N: Tensor, payload: memoryview) -> None:
        """Compute, whoever waits for it; the answer is the session's as well."""
        session, answer = job.session, b""
        try:
            answer = await self._answer(job, params_N, payload)
        finally:
            if session.in_work is not None:  # this is being closed, or has a fault
                answer = self._sessions.failed(session, "failed")
            self._waiting.pop(session).set_result(answer)

    async def _answer(self, job: ComputeText, params_N: Tensor, payload: memoryview) -> bytes:
        session = job.session
        if job.begins:
            session.cache = self._stage.caches(session.max_rows)
        work = partial(self._stage.extend, params_N, session.cache, payload, job.question.rows)
        try:
            async with self._turn:
                await asyncio.sleep(self._time.wait_s(self._loop.time()))
                output = await self._timed(work)
        except BadPayload:
            return self._sessions.failed(session, "payload")
        except (ValueError, RuntimeError) as error:  # the model's, also out of memory
            _log.warning("a text is given up: %s", error)
            return self._sessions.failed(session, "failed")
        return self._sessions.computed(session, output, self._loop.time())

    async def _timed(self, work: Callable[[], bytes]) -> bytes:
        began_s = self._loop.time()
        try:
            output: bytes = await self._compute(work)
            return output
        finally:
            now_s = self._loop.time()
            self._time.spend(now_s - began_s, now_s)

    def _let_go(self) -> None:
        """Let parameters go that no session reads."""
        for position in self._params.keys() - self._sessions.positions:
            del self._params[position]
