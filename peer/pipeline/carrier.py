"""Carries out what a `Hop` asks: passes and notes over a transport, jobs for the trainer's thread.

The hop and all methods here live in the event loop. The trainer takes its jobs from a `Workbench`,
in the order in which the hop gave them, and reports each result by name; the report comes back into
the loop. Streams `pass` and calls `pass-note` belong to the run and not to a module, as they cross
from one module to the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from atoll.coordinator.run.notice import Report
from atoll.dht.refusals import RefusalCode
from atoll.dht.roster import PeerRecord
from atoll.dht.tasks import KeptTasks, together
from atoll.dht.transport import (
    PeerUnreachable,
    Refused,
    Stream,
    Transport,
    TransportError,
)
from atoll.optim.log.entry import MalformedRecord
from atoll.optim.log.live_replica import Compute
from atoll.peer import notices
from atoll.peer.pipeline.actions import (
    Action,
    AnswerPass,
    Complain,
    Drained,
    MicrobatchEnded,
    RunJob,
    SendFailure,
    SendPass,
    SettleHeld,
    TakeStep,
    Tell,
)
from atoll.peer.pipeline.hop import Hop
from atoll.peer.pipeline.messages import (
    FrameShape,
    PassAnswer,
    PassHeader,
    PassKey,
    Payload,
    decode_note,
    encode_note,
    payload_bytes,
    read_payload,
)
from atoll.peer.pipeline.send_queue import FairTurns, SendQueue
from atoll.peer.pipeline.workbench import Workbench

PASS, NOTE = "pass", "pass-note"
CONNECT_S = 5.0  # a peer of the roster is connected already; else another one is tried
ANSWER_S = 5.0  # the receiver answers a header at once, from its loop
PROGRESS_S = 10.0  # for a message of 1 MiB: 1 Mbit/s is too slow for a pipeline
NOTE_S = 5.0
PIECE_BYTES = 1 << 16  # for which a payload takes a turn: a return need not wait for a whole output
TICK_S = 0.05  # passes take tenths of a second and more
MAX_COMPLAINTS = 64  # about peers in one process; an owner reads no more
BEFORE_ROUNDS = -1  # where rounds have their position: a trainer in its round sends no passes
TAKEN = b"\1"  # the receiver has the payload

Turn = Callable[[int, tuple[int, ...]], asyncio.Future[None]]
"""Takes a number of bytes and their rank, and returns what is done when they may leave: those of
the smaller rank first. Cancelling it gives the turn up."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The callbacks by which an origin hears of its microbatches."""

    on_ended: Callable[[MicrobatchEnded], None] = lambda ended: None
    on_drained: Callable[[Drained], None] = lambda drained: None


class Carrier:
    """One peer's hop, connected to its neighbours and its trainer."""

    def __init__(
        self,
        hop: Hop,
        transport: Transport,
        shape: FrameShape,
        *,
        bench: Workbench,
        tasks: KeptTasks,
        compute: Compute,
        turn: Turn,
        ended: Ended | None = None,
        on_event: Report = lambda level, text: None,
    ) -> None:
        """Serve passes from now on.

        Args:
            hop: the machine.
            transport: of the run.
            shape: of the run's frames.
            bench: takes the trainer's jobs and gives their results.
            tasks: own what this sends.
            compute: runs what would block the loop.
            turn: of this peer's uplink, which rounds share.
            ended: takes what the hop reports of its own microbatches.
            on_event: takes what this peer's owner may want to know.
        """
        self.hop = hop
        self._transport, self._shape = transport, shape
        self._bench, self._tasks, self._compute = bench, tasks, compute
        self._turn, self._queue, self._fair = turn, SendQueue(), FairTurns()
        self._lines: dict[str, asyncio.Lock] = {}
        """by peer: its payloads leave one after the other"""
        self._ended, self._on_event = ended or Ended(), on_event
        self._complained: set[str] = set()
        """peers about which the owner knows"""
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, str] = {}
        """incarnations of the peers of the next stage, as the hop knows them"""
        bench.report_to(self._report)
        transport.serve_stream(PASS, self._serve_pass)
        transport.serve(NOTE, self._serve_note)

    async def keep(self) -> None:
        """Let time pass for the hop, until cancelled."""
        while True:
            if self.hop.due_s <= self._now():
                self.act(self.hop.tick(self._now()))
            await asyncio.sleep(TICK_S)

    def look(
        self, next_stage: Collection[PeerRecord], leaving: Collection[PeerRecord] = ()
    ) -> None:
        """Take the peers of the next stage that are here now, and those that drain before a move.

        What the latter have would otherwise be computed twice, and count twice.
        """
        here = {record.peer_id: record for record in next_stage}
        draining = {record.peer_id: record.incarnation for record in leaving}
        for peer in self._known.keys() - here.keys():
            if draining.get(peer) == self._known[peer]:
                self.act(self.hop.leaves(peer, self._now()))
                continue
            del self._known[peer]
            self.act(self.hop.left(peer, self._now()))
        for peer, record in here.items():
            self._known[peer] = record.incarnation
            rate = record.place.tokens_per_s if record.place else 0.0
            self.act(
                self.hop.appeared(
                    peer, incarnation=record.incarnation, rows_per_s=rate or None, now_s=self._now()
                )
            )

    async def withdraw(self) -> None:
        """Give up what is in work, and tell its senders; takes up to `NOTE_S`."""
        actions = self.hop.withdraw(self._now())
        self.act([action for action in actions if not isinstance(action, Tell)])
        # The tasks of a peer that leaves are about to end.
        await together(*(self._tell(action) for action in actions if isinstance(action, Tell)))

    def act(self, actions: Sequence[Action]) -> None:
        """Carry out actions in their order."""
        for action in actions:
            if isinstance(action, RunJob | TakeStep | SettleHeld):
                self._bench.put(action)
            elif isinstance(action, SendPass) and action.asks:
                self._begin_send(action)
            elif isinstance(action, SendPass):
                self._queue.put(action)
            elif isinstance(action, Tell):
                self._tasks.spawn(self._tell, action)
            elif isinstance(action, MicrobatchEnded):
                self._ended.on_ended(action)
                if not action.trains:
                    self._bench.put(action)
            elif isinstance(action, Drained):
                self._ended.on_drained(action)
            elif isinstance(action, Complain):
                self._complain(action)
            # An `AnswerPass` belongs to the stream whose header was offered.
        self._begin_sends()

    def _complain(self, about: Complain) -> None:
        """Name a peer that sends what cannot be used, once."""
        if about.peer in self._complained or len(self._complained) >= MAX_COMPLAINTS:
            return
        self._complained.add(about.peer)
        unusable = notices.unusable(peer=about.peer, reason=about.text, origin=about.origin or None)
        self._on_event("warning", unusable)

    def _now(self) -> float:
        return self._loop.time()

    def _report(self, result: str, values: Sequence[Any], named: dict[str, Any]) -> None:
        """Bring a result from the trainer's thread into the loop."""
        self._loop.call_soon_threadsafe(partial(self._take_result, result, values, named))

    def _take_result(self, result: str, values: Sequence[Any], named: dict[str, Any]) -> None:
        try:
            self.act(getattr(self.hop, result)(*values, now_s=self._now(), **named))
        except Exception:
            # The job would count as running for ever, and the trainer would get no other one.
            if values and isinstance(values[0], PassKey):
                self.act(self.hop.job_failed(values[0], self._now()))
            raise

    # Receiving

    async def _serve_pass(self, remote: str, stream: Stream) -> None:
        header = await self._header(stream)
        answer = self._offered(remote, header)
        if answer.verdict != "accepted":
            await stream.send(answer.encode(), timeout_s=ANSWER_S)
            return
        try:
            await stream.send(answer.encode(), timeout_s=ANSWER_S)
            payload = await self._payload(stream, header)
        except BaseException:
            self.act(self.hop.not_received(remote, header, self._now()))
            raise
        self.act(self.hop.received(remote, header, payload, self._now()))
        await stream.send(TAKEN, timeout_s=ANSWER_S)

    async def _header(self, stream: Stream) -> PassHeader:
        message = await stream.recv(timeout_s=ANSWER_S)
        try:
            return PassHeader.decode(message or b"")
        except MalformedRecord as error:
            raise Refused(RefusalCode.BAD_MESSAGE, str(error)) from error

    def _offered(self, remote: str, header: PassHeader) -> PassAnswer:
        actions = self.hop.offered(remote, header, self._now())
        self.act(actions)
        return next(
            action.answer
            for action in actions
            if isinstance(action, AnswerPass) and action.header is header
        )

    async def _payload(self, stream: Stream, header: PassHeader) -> Payload:
        """Return the payload that a checked header announces, once it is read and checked too."""
        try:
            # The hop gives a pass up whose payload is late; what came of it must go as well.
            async with asyncio.timeout(self.hop.arrival_s):
                data = await self._bytes(stream, payload_bytes(header, self._shape))
            payload: Payload = await self._compute(read_payload, header, data, self._shape)
        except TimeoutError as error:
            raise Refused(RefusalCode.BAD_MESSAGE, "the payload took too long") from error
        except MalformedRecord as error:
            text = f"sends what cannot be used: {error}"
            self._complain(Complain(peer=stream.remote, text=text, origin=header.origin))
            raise Refused(RefusalCode.BAD_MESSAGE, str(error)) from error
        return payload

    async def _bytes(self, stream: Stream, expected: int) -> bytearray:
        data = bytearray()
        while len(data) < expected:
            piece = await stream.recv(timeout_s=PROGRESS_S)
            if not piece or len(data) + len(piece) > expected:
                got = len(data) + len(piece or b"")
                raise Refused(
                    RefusalCode.BAD_MESSAGE, f"expected a payload of {expected} bytes, got {got}"
                )
            data += piece
        return data

    async def _serve_note(self, remote: str, body: bytes) -> bytes:
        try:
            note = decode_note(body)
        except MalformedRecord as error:
            raise Refused(RefusalCode.BAD_MESSAGE, str(error)) from error
        self.act(self.hop.noted(remote, note, self._now()))
        return b""

    # Sending

    def _begin_sends(self) -> None:
        while (send := self._queue.take()) is not None:
            self._begin_send(send)

    def _begin_send(self, send: SendPass) -> None:
        remaining_ms = self.hop.remaining_ms(send, self._now())
        if remaining_ms:
            self._tasks.spawn(self._send, send, remaining_ms)
        else:  # it waited in vain, and the hop has noted that already
            self._queue.end(send)

    async def _send(self, send: SendPass, remaining_ms: int) -> None:
        try:
            failure = await self._sent(send, remaining_ms)
        finally:
            self._queue.end(send)
        if failure is not None:
            self.act(self.hop.send_failed(send, failure, self._now()))
        self._begin_sends()

    async def _sent(self, send: SendPass, remaining_ms: int) -> SendFailure | None:
        """Send a pass; return why it failed, None if it was answered and, if accepted, taken."""
        is_connected = False
        header = send.header.model_copy(update={"remaining_ms": remaining_ms})
        try:
            # Beyond its time a pass is of no use to anybody, and a slow peer would keep its bytes.
            async with (
                asyncio.timeout(remaining_ms / 1000),
                await self._transport.open(send.peer, PASS, timeout_s=CONNECT_S) as stream,
            ):
                is_connected = True
                await stream.send(header.encode(), timeout_s=ANSWER_S)
                answer = PassAnswer.decode(await stream.recv(timeout_s=ANSWER_S) or b"")
                self.act(self.hop.answered(send, answer, self._now()))
                if answer.reason in ("shape", "protocol"):
                    text = f"refuses what this peer sends, as of another {answer.reason}"
                    self._complain(Complain(peer=send.peer, text=text))
                if answer.verdict != "accepted":
                    return None
                await self._send_payload(stream, send)
                self._queue.end(send)
                self._begin_sends()
                if await stream.recv(timeout_s=PROGRESS_S) != TAKEN:
                    return "lost"
        except TimeoutError:  # `DeadlineExceeded` is one
            return "timed-out"
        except PeerUnreachable:
            return "lost" if is_connected else "unreachable"
        except (TransportError, MalformedRecord):
            return "lost"
        except Exception:
            # Reported as the hop's own error, which bans nobody; the exception is logged.
            self.act(self.hop.send_failed(send, "own", self._now()))
            raise
        self.act(self.hop.delivered(send, self._now()))
        return None

    async def _send_payload(self, stream: Stream, send: SendPass) -> None:
        """Send a payload, after those to the same peer that were accepted before."""
        line = self._lines.setdefault(send.peer, asyncio.Lock())
        try:
            async with line:
                for part in (send.payload.tokens, send.payload.frame):
                    view = memoryview(part)
                    for start in range(0, len(view), PIECE_BYTES):
                        await self._send_piece(stream, view[start : start + PIECE_BYTES])
        finally:
            if not line.locked():
                self._lines.pop(send.peer, None)

    async def _send_piece(self, stream: Stream, piece: memoryview) -> None:
        rank = self._fair.rank(stream.remote, len(piece))
        turn = self._turn(len(piece), (BEFORE_ROUNDS, rank))
        try:
            await turn
        finally:
            turn.cancel()  # a future, not a task: gives its place back
        self._fair.left(rank)
        await stream.send(piece, timeout_s=PROGRESS_S)

    async def _tell(self, tell: Tell) -> None:
        try:
            await self._transport.call(tell.peer, NOTE, encode_note(tell.note), timeout_s=NOTE_S)
        except (TransportError, TimeoutError):
            self.act(self.hop.untold(tell, self._now()))
        else:
            self.act(self.hop.told(tell, self._now()))
