"""A client that computes logits through the stages of a live run, from server to server and back.

It holds the tokens, and for each stage the inputs that it has sent. So any server can be replaced:
another one gets the inputs of that stage again, and the rest of the way does not notice (Petals,
arXiv:2312.08361). Departures from Petals: a session reads the parameters of one position of each
stage's log, so that a text has one model; and a question is known by its position and content, so
that it can be asked again.

If no server has a stage at the session's position any more, because the run went on, the text
begins again at the newest positions of all stages, with all its tokens.

Once a text is longer than the model's context, its window moves with each token, as it does for a
checkpoint: every position is another one then, and all of it is computed again.

# V vocabulary
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from atoll.coordinator.run.notice import Report
from atoll.dht.refusals import RefusalCode
from atoll.dht.roster import PeerRecord, RosterError
from atoll.dht.scoped import transport_of
from atoll.dht.transport import PeerUnreachable, Refused, Transport, TransportError
from atoll.optim.log.entry import MalformedRecord
from atoll.peer import notices
from atoll.peer.inference.choice import Servers
from atoll.peer.inference.messages import (
    NUMBER_BYTES,
    SESSION_BYTES,
    TEXT,
    TEXT_PROTOCOL,
    Extend,
    Extended,
    TextShape,
    expect_length,
    pack,
    unpack,
)
from atoll.peer.pipeline.wiring import MAX_PAUSE_S

CONNECT_S = 7.0  # libp2p does not dial again within 5 s of a failure
ANSWER_S = 30.0  # for a piece of a text on a peer that rests four fifths of the time
LOOK_EVERY_S = 2.0  # a record lives 20 s
POLL_S = 0.1  # between two looks for a free server
MAX_MOVES = 8  # in a row, without a token between them
MAX_GAPS = 4  # of one server for one token: it forgets what it has answered
MAX_BUSY = 20  # answers in a row before another server takes over, at half a second each


class NoServer(Exception):
    """A stage has no peer that serves the text; the message says why."""


class RunTooFast(Exception):
    """The run's rounds end sooner than a text can begin again."""


class _LeftBehind(Exception):
    """No server of a stage reads the position of the session any more."""


class _Replace(Exception):
    """Another server has to take over."""


Look = Callable[[], Awaitable[Mapping[str, PeerRecord]]]
"""Returns the peers in the run."""


@dataclass(kw_only=True)
class StageText:
    """The client's records of one stage."""

    servers: Servers
    shape: TextShape
    server: PeerRecord | None = None
    """None while another one is sought"""
    session: bytes = b""
    began_at: tuple[str, str] = ("", "")
    """PeerID and incarnation of the server that has the session"""
    position: int | None = None
    """of the stage's log, once a server has told it"""
    sent: bytearray = field(default_factory=bytearray)
    """the stage's inputs, from the first position of the text on"""
    held: int = 0
    """rows that the server has"""

    @property
    def rows(self) -> int:
        """Return the positions that were sent."""
        return len(self.sent) // self.shape.row_bytes

    def begin_again(self) -> None:
        """Drop the inputs, but keep server and position."""
        self.sent.clear()
        self.held = 0

    def give_to(self, server: PeerRecord) -> None:
        """Take a server; if it is the one of before, it may still have the session."""
        self.server, process = server, (server.peer_id, server.incarnation)
        if self.began_at != process:
            self.began_at = process
            self.begin_session()

    def begin_session(self) -> None:
        """Give the text another name, of which no server has anything."""
        self.session, self.held = secrets.token_bytes(SESSION_BYTES), 0


class LiveModel:
    """The model of a run, as one client reads it for one text at a time."""

    def __init__(
        self,
        transport: Transport,
        look: Look,
        modules: Sequence[str],
        *,
        width: int,
        vocab_size: int,
        num_logits: int,
        context: int,
        wait_s: float,
        on_event: Report = lambda level, notice: None,
        rng: random.Random | None = None,
    ) -> None:
        """Ask nobody yet.

        Args:
            transport: of the run.
            look: returns the peers in the run.
            modules: the stages, from the first on.
            width: numbers of a row between stages.
            vocab_size: ids are below it.
            num_logits: numbers of the last stage's answer.
            context: most positions that the model sees.
            wait_s: how long to wait for a server of a stage.
            on_event: takes what a person may want to know.
            rng: chooses servers, and spreads pauses.
        """
        self._transport, self._look_up = transport, look
        self._wait_s, self._on_event = wait_s, on_event
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._looked_s = -LOOK_EVERY_S
        rng = rng or random.Random()
        last = len(modules) - 1
        self._stages = [
            StageText(
                servers=Servers(module, rng),
                shape=TextShape(
                    is_first=index == 0,
                    is_last=index == last,
                    width=width,
                    vocab_size=vocab_size,
                    num_logits=num_logits,
                    max_rows=context,
                ),
            )
            for index, module in enumerate(modules)
        ]
        self._max_rows = context
        self._window: list[int] = []
        """tokens that the caches hold"""

    @property
    def positions(self) -> tuple[int | None, ...]:
        """Return the position of each stage's log that the text reads."""
        return tuple(stage.position for stage in self._stages)

    @property
    def servers(self) -> tuple[str | None, ...]:
        """Return the PeerID of each stage's server."""
        asked = (stage.server for stage in self._stages)
        return tuple(None if server is None else server.peer_id for server in asked)

    def expect_rows(self, rows: int) -> None:
        """Let servers reserve memory for a text of at most so many positions."""
        self._max_rows = max(1, min(rows, self._context))

    async def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return `logits_V` after a text, float32 on the CPU.

        Raises:
            NoServer: a stage has no peer that serves the text, for as long as was to be waited.
            RunTooFast: the run's rounds end sooner than the text can begin again.
        """
        window = list(tokens[-self._context :])
        for _ in range(MAX_MOVES):
            known = len(self._window)
            if known == 0 or known >= len(window) or window[:known] != self._window:
                self._begin_again()
            new, self._window = window[len(self._window) :], window
            try:
                return await self._through_all(new)
            except _LeftBehind:
                self._on_event("info", notices.text_moved_on())
                self._forget()
        raise RunTooFast(
            "the run's rounds end sooner than this text can be computed anew; generate fewer "
            "tokens, or take a checkpoint: atoll sample CHECKPOINT"
        )

    async def _through_all(self, ids: Sequence[int]) -> Tensor:
        rows = np.asarray(ids, dtype="<i4").tobytes()
        for stage in self._stages:
            stage.sent += rows
            rows = await self._through(stage, len(ids))
        return torch.from_numpy(np.frombuffer(rows, dtype="<f4").astype(np.float32))

    async def _through(self, stage: StageText, num_new: int) -> bytes:
        """Return a stage's output at the newest positions, from whichever server has it."""
        while True:
            if stage.server is None:
                stage.give_to(await self._server_for(stage))
            try:
                return await self._asked(stage, num_new)
            except _Replace:
                stage.server = None

    async def _asked(self, stage: StageText, num_new: int) -> bytes:
        """Send the server what it lacks; return its output at the newest positions.

        Raises:
            _Replace: another server has to take over.
        """
        first_new, gaps = stage.rows - num_new, 0
        if stage.held > first_new:  # the outputs of these were lost with an attempt before
            stage.begin_session()
        outputs, payload = bytearray(), memoryview(b"")
        while stage.held < stage.rows:
            start = stage.held
            stop = min(stage.rows, start + stage.shape.piece_rows)
            if start < first_new:  # the answer to old positions is of no use
                stop = min(stop, first_new)
            answer, payload = await self._ask(stage, start, stop - start)
            if answer.verdict == "gap":
                gaps += 1
                if answer.held >= start or gaps > MAX_GAPS:
                    raise self._told_falsely(stage, "with a count of rows that cannot be")
                stage.held = answer.held
                del outputs[max(0, stage.held - first_new) * NUMBER_BYTES * stage.shape.width :]
                continue
            self._take_done(stage, answer, stop)
            if start >= first_new and not stage.shape.is_last:
                outputs += payload
        return bytes(payload if stage.shape.is_last else outputs)

    def _take_done(self, stage: StageText, answer: Extended, stop: int) -> None:
        """Take the account of an answer."""
        if answer.held != stop or stage.position not in (None, answer.position):
            raise self._told_falsely(stage, "for another session")
        assert stage.server is not None
        stage.position, stage.held = answer.position, stop
        stage.servers.answered(stage.server.peer_id)

    async def _ask(self, stage: StageText, start: int, rows: int) -> tuple[Extended, memoryview]:
        """Ask for some rows; return an answer that is "done" or "gap", with its checked payload."""
        size = stage.shape.row_bytes
        question = Extend(
            protocol=TEXT_PROTOCOL,
            session=stage.session,
            position=stage.position,
            start=start,
            rows=rows,
            max_rows=self._max_rows,
        )
        body = pack(question, bytes(stage.sent[start * size : (start + rows) * size]))
        answer, payload = await self._replied(stage, body)
        for _ in range(MAX_BUSY):
            if answer.verdict != "busy" or not start:
                break
            pause_s = min(max(answer.retry_ms / 1000, POLL_S), MAX_PAUSE_S)
            await asyncio.sleep(pause_s)  # another one would need the text from its beginning
            answer, payload = await self._replied(stage, body)
        self._expect_usable(stage, answer, payload, rows)
        return answer, payload

    async def _replied(self, stage: StageText, body: bytes) -> tuple[Extended, memoryview]:
        """Return what the server answers."""
        assert stage.server is not None
        peer, servers = stage.server.peer_id, stage.servers
        try:
            reply = await transport_of(servers.module, self._transport).call(
                peer, TEXT, body, timeout_s=ANSWER_S
            )
            return unpack(Extended, reply)
        except Refused as error:
            self._take_refusal(stage, error)
        except PeerUnreachable:
            servers.was_lost(peer, self._loop.time())
        except (TransportError, TimeoutError):
            servers.was_silent(peer, self._loop.time())
        except MalformedRecord as error:
            raise self._told_falsely(stage, f"that is none: {error}") from None
        raise _Replace

    def _take_refusal(self, stage: StageText, error: Refused) -> None:
        """Note that a server refuses by its transport."""
        assert stage.server is not None
        if error.code is RefusalCode.INTERNAL:
            stage.servers.was_lost(stage.server.peer_id, self._loop.time())
            return
        if error.code is RefusalCode.UNKNOWN_METHOD:  # its owner's choice
            stage.servers.is_off(stage.server.peer_id)
            return
        self._refuses(stage, error.message)

    def _refuses(self, stage: StageText, reason: str | None) -> None:
        assert stage.server is not None
        peer, module = stage.server.peer_id, stage.servers.module
        stage.servers.refuses(peer)
        refused = notices.text_refused(peer=peer, module=module, reason=reason)
        self._on_event("warning", refused)

    def _expect_usable(
        self, stage: StageText, answer: Extended, payload: memoryview, rows: int
    ) -> None:
        """Raise unless an answer brings the text further."""
        assert stage.server is not None
        peer, servers = stage.server.peer_id, stage.servers
        match answer.verdict:
            case "busy":
                servers.was_busy(peer, answer.retry_ms / 1000, self._loop.time())
                raise _Replace
            case "moved" if stage.position is None:
                raise self._told_falsely(stage, "about a round that it was not asked for")
            case "moved":
                servers.has_moved(peer, stage.position)
                raise _Replace
            case "refused":
                self._refuses(stage, answer.reason)
                raise _Replace
            case "gap":
                return
        try:
            expect_length(payload, stage.shape.output_bytes(rows))
        except MalformedRecord as error:
            raise self._told_falsely(stage, f"of another shape: {error}") from None
        if not np.isfinite(np.frombuffer(payload, dtype="<f4")).all():
            raise self._told_falsely(stage, "with numbers that are not finite")

    def _told_falsely(self, stage: StageText, how: str) -> _Replace:
        assert stage.server is not None
        peer, module = stage.server.peer_id, stage.servers.module
        unusable = notices.text_unusable(peer=peer, module=module, reason=how)
        self._on_event("warning", unusable)
        stage.servers.lied(peer)
        return _Replace()

    # Servers

    async def _server_for(self, stage: StageText) -> PeerRecord:
        """Return a connected server; wait for one."""
        servers, until_s, is_told = stage.servers, self._loop.time() + self._wait_s, False
        while True:
            await self._look()
            record = servers.choose(stage.position, self._loop.time())
            if record is not None and await self._connected(servers, record):
                return record
            if record is None and servers.have_moved(stage.position):
                raise _LeftBehind
            if self._loop.time() >= until_s:
                raise NoServer(self._nobody(servers))
            if not is_told and record is None:
                is_told = True
                waits = notices.text_waits(
                    servers.account(), module=servers.module, timeout_s=self._wait_s
                )
                self._on_event("info", waits)
            await asyncio.sleep(POLL_S)

    async def _connected(self, servers: Servers, record: PeerRecord) -> bool:
        try:
            await self._transport.connect(record.peer_id, record.addresses, timeout_s=CONNECT_S)
        except (TransportError, TimeoutError, ValueError):
            servers.was_silent(record.peer_id, self._loop.time())
            return False
        return True

    def _nobody(self, servers: Servers) -> str:
        remedy = "wait longer with --wait, or take a checkpoint: atoll sample CHECKPOINT"
        if servers.all_are_off:
            remedy = "peers serve texts if their owners start them with --serve; " + remedy
        nobody = f"no server of {servers.module} within {self._wait_s:g} s"
        return f"{nobody}: {servers.account()}; {remedy}"

    async def _look(self) -> None:
        """Look who is in the run, every few seconds."""
        if self._loop.time() - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = self._loop.time()
        try:
            records = (await self._look_up()).values()
        except (RosterError, TransportError, TimeoutError, OSError):
            return  # the records of the last look will do
        for stage in self._stages:
            stage.servers.look(records)

    # Beginning again

    def _begin_again(self) -> None:
        """Compute the text from its first position on, at the same positions of the logs."""
        self._window = []
        for stage in self._stages:
            stage.begin_again()

    def _forget(self) -> None:
        """Read the newest positions of all logs, in sessions of their own."""
        self._begin_again()
        for stage in self._stages:
            stage.position = None
            stage.begin_session()
