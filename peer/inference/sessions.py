"""The sessions of one server, as a machine without sockets, tensors or clocks.

    verdict = sessions.asked(client, question, digest, here=12, now_s=now_s)
    ComputeText             let `sessions.computed` or `sessions.failed` follow
    Await                   the same question is in work: its answer is this one's too
    bytes                   an answer

Sessions are named by (client, session), so that no client touches those of another. A question that
comes again gets the same answer, whatever became of the first: see `messages`. Each session is
pinned to one position of the stage's log. Those at the present one, and at the newest of the
others, live on; when the log leaves a third behind, its sessions end, and their clients are told
`moved`. So a server holds the parameters of at most one position besides its own, and only as long
as a session reads them (`positions`).

Room is reserved when a session begins, for as many positions as it says it may get. What one client
may have is a share of all. A client that wants more loses its own oldest session; at the limit of
all, the one that was idle for longest goes, if that was for `grace_s`. Else the answer is busy: a
session in use is never taken from one client for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from atoll.peer.inference.messages import (
    PIECE_BYTES,
    Extend,
    Extended,
    RefusedText,
    TextShape,
    pack,
    refusal_of,
)
from atoll.peer.pipeline.messages import MAX_RETRY_MS

BUSY_RETRY_S = 0.5  # until a computation has ended, or a session is idle


@dataclass(frozen=True, kw_only=True)
class SessionRules:
    """A server's limits on texts."""

    shape: TextShape
    cache_bytes: Callable[[int], int]
    """rows -> bytes that a session of so many keeps"""
    max_sessions: int = 32
    client_sessions: int = 4
    max_bytes: int = 1 << 30
    """The bytes of all caches, with one answer each; one client gets half of them."""
    client_share: float = 0.5
    idle_s: float = 120.0
    """A session that is asked nothing for so long ends."""
    grace_s: float = 10.0
    """A session that was asked within this time ends for nobody else."""
    max_waiting: int = 16
    """Computations that are in work, or wait for their turn."""


class SessionName(NamedTuple):
    """The name of a session."""

    client: str
    """PeerID, as the transport authenticated it"""
    session: bytes


@dataclass(kw_only=True, eq=False)
class TextSession:
    """One text at one stage."""

    name: SessionName
    position: int
    """of the log, whose parameters it reads"""
    max_rows: int
    num_bytes: int
    used_s: float
    held: int = 0
    """rows that the cache has"""
    in_work: Extend | None = None
    last: tuple[int, int, bytes] | None = None
    """start, rows and digest of the last question that was computed, or of the one in work"""
    answer: bytes = b""
    """to that question"""
    cache: Any = None
    """what the driver keeps of it"""


@dataclass(frozen=True, kw_only=True)
class ComputeText:
    """Compute new positions of a session."""

    session: TextSession
    question: Extend
    begins: bool
    """whether with an empty cache"""


@dataclass(frozen=True, kw_only=True)
class Await:
    """The same question is in work."""

    session: TextSession


@dataclass(frozen=True, kw_only=True)
class TextStatistics:
    """The sessions that a server holds, and its counts since its start."""

    sessions: int
    num_bytes: int
    begun: int
    rows: int
    busy: int
    evicted: int


@dataclass(kw_only=True)
class _Counts:
    begun: int = 0
    rows: int = 0
    busy: int = 0
    evicted: int = 0


@dataclass(kw_only=True)
class Sessions:
    """The sessions of one server. All times are seconds on one clock."""

    rules: SessionRules
    _known: dict[SessionName, TextSession] = field(default_factory=dict)
    _counts: _Counts = field(default_factory=_Counts)

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[TextSession]:
        return iter(list(self._known.values()))

    @property
    def positions(self) -> frozenset[int]:
        """Return the positions of the log that sessions read."""
        return frozenset(one.position for one in self._known.values())

    def statistics(self) -> TextStatistics:
        """Return what is held, and what was done."""
        return TextStatistics(sessions=len(self), num_bytes=self._bytes(self), **vars(self._counts))

    def asked(
        self, client: str, question: Extend, digest: bytes, *, here: int, now_s: float
    ) -> ComputeText | Await | bytes:
        """Take a question whose payload has the right length.

        Args:
            client: PeerID of who asks.
            question: the question.
            digest: of its payload.
            here: where the stage's log stands.
            now_s: the time.
        """
        self.tick(here=here, now_s=now_s)
        reason = refusal_of(question, self.rules.shape)
        if reason is not None:
            return refused(reason)
        session = self._known.get(SessionName(client, question.session))
        if session is None:
            return self._begun(client, question, digest, here=here, now_s=now_s)
        session.used_s = now_s
        if question.position not in (None, session.position):
            return _answer(Extended(verdict="moved", position=session.position))
        if question.max_rows > session.max_rows:
            return refused("shape")
        return self._grown(session, question, digest)

    def computed(self, session: TextSession, payload: bytes, now_s: float) -> bytes:
        """Take the output of a question in work; return its answer."""
        question = session.in_work
        assert question is not None
        session.held, session.in_work = question.start + question.rows, None
        session.used_s = now_s
        done = Extended(verdict="done", position=session.position, held=session.held)
        session.answer = pack(done, payload)
        self._counts.rows += question.rows
        return session.answer

    def failed(self, session: TextSession, reason: RefusedText) -> bytes:
        """Note that a question in work cannot be answered; the session ends."""
        session.in_work = None
        self._end(session)
        return refused(reason)

    def tick(self, *, here: int, now_s: float) -> None:
        """End what is idle for too long, and what reads parameters that are left behind.

        Args:
            here: where the stage's log stands.
            now_s: the time.
        """
        spare = max(self.positions - {here}, default=here)
        for one in self:
            is_idle = one.in_work is None and now_s - one.used_s >= self.rules.idle_s
            if is_idle or one.position not in (here, spare):
                self._end(one)

    def _begun(
        self, client: str, question: Extend, digest: bytes, *, here: int, now_s: float
    ) -> ComputeText | bytes:
        """Begin a session, if there is room."""
        if question.start:
            return _answer(Extended(verdict="gap", held=0))
        position = here if question.position is None else question.position
        if position not in self.positions | {here}:
            return _answer(Extended(verdict="moved", position=here))
        num_bytes = self.rules.cache_bytes(question.max_rows) + self._answer_bytes()
        if num_bytes > self.rules.client_share * self.rules.max_bytes:
            return refused("size")
        if not (self._may_compute and self._make_room(client, num_bytes, now_s)):
            return self._busy()
        session = TextSession(
            name=SessionName(client, question.session),
            position=position,
            max_rows=question.max_rows,
            num_bytes=num_bytes,
            used_s=now_s,
        )
        self._known[session.name] = session
        self._counts.begun += 1
        return self._begin(session, question, digest)

    def _grown(
        self, session: TextSession, question: Extend, digest: bytes
    ) -> ComputeText | Await | bytes:
        """Let a session grow, answer again, or begin again."""
        if session.last == (question.start, question.rows, digest):
            return Await(session=session) if session.in_work is not None else session.answer
        if session.in_work is not None:
            return self._busy()
        if question.start not in (0, session.held):
            return _answer(Extended(verdict="gap", position=session.position, held=session.held))
        if not self._may_compute:
            return self._busy()
        return self._begin(session, question, digest)

    def _begin(self, session: TextSession, question: Extend, digest: bytes) -> ComputeText:
        session.in_work, session.answer = question, b""
        session.last = (question.start, question.rows, digest)
        return ComputeText(session=session, question=question, begins=question.start == 0)

    @property
    def _may_compute(self) -> bool:
        return sum(one.in_work is not None for one in self) < self.rules.max_waiting

    def _make_room(self, client: str, num_bytes: int, now_s: float) -> bool:
        """End idle sessions until another one fits; return whether it does."""
        rules = self.rules
        while True:
            own = [one for one in self if one.name.client == client]
            own_bytes = rules.client_share * rules.max_bytes
            if len(own) >= rules.client_sessions or self._bytes(own) + num_bytes > own_bytes:
                leaves = self._longest_idle(own)
            elif len(self) >= rules.max_sessions or self._bytes(self) + num_bytes > rules.max_bytes:
                leaves = self._longest_idle(
                    one for one in self if now_s - one.used_s >= rules.grace_s
                )
            else:
                return True
            if leaves is None:
                return False
            self._counts.evicted += 1
            self._end(leaves)

    def _longest_idle(
        self, sessions: Iterator[TextSession] | list[TextSession]
    ) -> TextSession | None:
        idle = [one for one in sessions if one.in_work is None]
        return min(idle, key=lambda one: one.used_s, default=None)

    def _end(self, session: TextSession) -> None:
        self._known.pop(session.name, None)

    def _bytes(self, sessions: Sessions | list[TextSession]) -> int:
        return sum(one.num_bytes for one in sessions)

    def _answer_bytes(self) -> int:
        """Return the most that a kept answer has."""
        return max(PIECE_BYTES, self.rules.shape.output_bytes(1))

    def _busy(self) -> bytes:
        self._counts.busy += 1
        return busy(BUSY_RETRY_S)


def busy(retry_s: float) -> bytes:
    """Return the answer of a server that asks to be tried again later."""
    retry_ms = min(int(retry_s * 1000), MAX_RETRY_MS)
    return _answer(Extended(verdict="busy", retry_ms=retry_ms))


def refused(reason: RefusedText) -> bytes:
    """Return the answer of a server that will not take a question."""
    return _answer(Extended(verdict="refused", reason=reason))


def _answer(record: Extended) -> bytes:
    return pack(record)
