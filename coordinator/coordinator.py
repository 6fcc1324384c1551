"""The coordinator's decisions: who is admitted, when an epoch opens, what a run's status is.

It knows neither gRPC nor TLS: `service` calls it. All methods run in one event loop and return
soon; what blocks (the follower) runs in a thread.

Exceptions:

    Refusal      .code is a gRPC status in small letters; the text is for the other side
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atoll.coordinator.admission import Admission, Role
from atoll.coordinator.catching_up import CatchUp, FetchMissed
from atoll.coordinator.checkpointing import Checkpointing
from atoll.coordinator.epochs import Epochs
from atoll.coordinator.follower import Claim, Followed, Follower, NotNext
from atoll.coordinator.gossip import FetchModel, KeptModels, ToldRounds
from atoll.coordinator.history import History
from atoll.coordinator.keys import RunKeys
from atoll.coordinator.members import (
    MAX_MEMBERS,
    Member,
    Members,
    Pace,
    Publisher,
    common_position,
    window_s,
)
from atoll.coordinator.rounds import Rounds, contributors
from atoll.coordinator.rpc import HEARTBEAT_S, NONCE_TTL_S, PROTOCOL, join_payload
from atoll.coordinator.sessions import Sessions
from atoll.coordinator.spec import RunSpec
from atoll.coordinator.status import (
    EVENTS,
    MAX_GAPS,
    Event,
    Gap,
    Level,
    PeerStatus,
    RoundTrace,
    RunStatus,
)
from atoll.optim.log import Elector, Entry, LogError, Verify
from atoll.optim.store import Head

TICK_S = 0.5

RefusalCode = Literal[
    "unauthenticated",
    "permission_denied",
    "failed_precondition",
    "invalid_argument",
    "not_found",
    "resource_exhausted",
]


class Refusal(Exception):  # noqa: N818
    """A request that is answered with no."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        """`message` goes to the other side."""
        super().__init__(message)
        self.code: RefusalCode = code


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """What a peer says when it joins."""

    protocol: int
    version: str
    run_id: bytes
    peer_id: str
    role: str
    nonce: bytes
    signature: bytes
    token: bytes


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """What it gets, beside what all get."""

    admission: bytes
    session: bytes


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The answer to a heartbeat."""

    publish_from: int | None
    admission: bytes
    """Renewed, or empty."""
    finished: bool


class Coordinator:
    """One run."""

    def __init__(
        self,
        *,
        spec: RunSpec,
        keys: RunKeys,
        follower: Follower,
        history: History,
        checkpoints: Path,
        verify: Verify,
        bootstrap: Callable[[], Sequence[str]] = tuple,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """`follower` has resumed; `clock` tells the time, `steady` measures it."""
        self.spec = spec
        self._codec = spec.method().codec.spec
        self.keys = keys
        self.follower = follower
        self.run_id = follower.run_id
        self.members = Members()
        self._logged = spec.method().reduction != "pairs"
        self.rounds = self._open_rounds(history)
        self.finished = asyncio.Event()
        self._history = history
        self._verify = verify
        self._bootstrap = bootstrap
        self._clock = clock
        self._steady = steady
        self._sessions = Sessions(keys.session_secret)
        self._events: deque[Event] = deque(history.events(EVENTS), maxlen=EVENTS)
        self._epochs = Epochs(follower, min_peers=spec.round.min_peers, say=self._tell)
        self._publisher = Publisher()
        self._alive: set[str] = set()
        self._paces: dict[str, Pace] = {}
        self._admitted_until_s: dict[str, float] = {}
        self._checkpoints = Checkpointing(spec, follower, checkpoints, self._tell)
        self._catching_up: CatchUp | None = None
        self._models: KeptModels | None = None
        self._gaps = follower.store.gaps()
        self._diverged_told = False
        self._started_s = self._stored_start()
        self._saved_s = steady()
        self._recall_peers()
        if self._is_finished():
            self.finished.set()

    def now_s(self) -> float:
        """Seconds since 1970 by the clock of the run."""
        return self._clock()

    # Entering

    def challenge(self, peer_id: str) -> bytes:
        """A nonce for `peer_id` to sign."""
        return self._sessions.nonce(peer_id, self._clock())

    def join(self, request: JoinRequest) -> Welcome:
        """Admit a peer. Raises Refusal."""
        if request.protocol != PROTOCOL:
            raise Refusal(
                "failed_precondition",
                f"expected protocol {PROTOCOL}, got {request.protocol}: use the organiser's "
                "version of Atoll",
            )
        self._expect_run(request.run_id)
        self._expect_proof(request)
        self.expect_token(request.token)
        role = _role(request.role)
        self._say("info", request.peer_id, f"joined as {role} (version {request.version[:32]})")
        session = self._sessions.session(request.peer_id, self._clock() + self._admission_s())
        return Welcome(admission=self.admit(request.peer_id, role), session=session)

    def admit(self, peer_id: str, role: Role) -> bytes:
        """A fresh credential."""
        now_s = self._clock()
        expires_s = now_s + self._admission_s()
        self._admitted_until_s[peer_id] = expires_s
        admission = Admission(
            peer_id=peer_id,
            role=role,
            run_id=self.run_id,
            issued_s=int(now_s),
            expires_s=int(expires_s),
        )
        return admission.sign(self.keys.signer)

    def authenticate(self, peer_id: str, session: bytes) -> None:
        """Raises Refusal unless this is the peer's current session."""
        if not self._sessions.is_session(session, peer_id, self._clock()):
            raise Refusal("unauthenticated", "expected a current session: join first")

    def expect_pace(self, peer_id: str) -> None:
        """Raises Refusal when an authenticated peer reports far too often."""
        if len(self._paces) > 2 * MAX_MEMBERS:
            self._paces.clear()
        if not self._paces.setdefault(peer_id, Pace()).take(self._steady()):
            raise Refusal("resource_exhausted", "expected fewer reports; slow down")

    def expect_token(self, token: bytes) -> None:
        """Raises Refusal if the run is closed and this is not its token."""
        if self.spec.coordinator.invite_only and not _same(token, self.keys.token):
            raise Refusal(
                "permission_denied",
                "expected the token of this run's invite; ask the organiser for an invite",
            )

    # Being in touch

    def heartbeat(
        self,
        status: PeerStatus,
        events: Sequence[Event],
        traces: Sequence[RoundTrace],
        *,
        leaving: bool,
    ) -> Beat:
        """Take what an authenticated peer says about itself."""
        now_s = self._steady()
        before = self.members.update(status, now_s, left=leaving)
        self._tell_changes(before, status, leaving=leaving)
        for event in events:
            self._add(
                Event(at=self._clock(), level=event.level, source=status.peer_id, text=event.text)
            )
        for trace in traces:
            if isinstance(self.rounds, ToldRounds):
                self.rounds.tell(status.peer_id, trace, self._clock())
            else:
                self.rounds.trace(status.peer_id, trace)
        return Beat(
            publish_from=self._publish_from(status.peer_id, now_s),
            admission=self._renewal(status),
            finished=self.finished.is_set(),
        )

    def heartbeat_s(self) -> float:
        """How often peers should report: 200 reports a second at most."""
        return max(HEARTBEAT_S, len(self.members) / 200)

    def bootstrap(self) -> list[str]:
        """Multiaddrs of the run's first DHT node."""
        return list(self._bootstrap())

    # The log

    async def precheck(self, entry: bytes, certificate: bytes) -> Claim | None:
        """Check an offered entry; None if it is not the next one. Raises Refusal."""
        if self._catching_up is not None and self._catching_up.is_installing:
            return None  # threads that wait for the follower would keep all others from working
        try:
            return await asyncio.to_thread(self.follower.precheck, entry, certificate)
        except NotNext:
            return None
        except LogError as error:
            raise Refusal("invalid_argument", str(error)) from None

    async def accept(self, claim: Claim, body: bytearray, source: str) -> bool:
        """Take an entry with its body; False if another peer was quicker. Raises Refusal."""
        electorate = self.follower.electorate
        try:
            await asyncio.to_thread(self.follower.accept, claim, body)
        except NotNext:
            return False
        except LogError as error:
            self._say("warning", source, f"sent a wrong body: {error}")
            raise Refusal("invalid_argument", str(error)) from None
        left_out = _left_out(electorate, claim.entry)
        valid_loss = self._mean_valid_loss()
        self.rounds.add(claim.entry, self._clock(), left_out=left_out, valid_loss=valid_loss)
        self._moved_on()
        return True

    def fetch_missed_with(self, fetch: FetchMissed) -> CatchUp:
        """Say how entries are fetched that no peer can publish; the caller closes what it gets."""
        catching_up = CatchUp(self.follower, fetch, on_taken=self._on_missed, say=self._tell)
        self._catching_up = catching_up
        return catching_up

    def fetch_models_with(self, fetch: FetchModel) -> KeptModels:
        """Say how peers' models are fetched; the caller closes what it gets."""
        self._models = KeptModels(
            self.follower,
            fetch,
            every=self.spec.coordinator.checkpoint_every,
            last=self.spec.run.rounds,
            on_kept=self._on_kept,
            say=self._tell,
        )
        return self._models

    def _on_kept(self) -> None:
        self._note_finished()
        self._checkpoints.look(last=True)

    def _open_rounds(self, history: History) -> Rounds:
        if not self._logged:
            return ToldRounds(history, self._mean_valid_loss)
        fragments = self.follower.replay.fragments
        return Rounds(history, self.follower.store, num_fragments=len(fragments))

    def _mean_valid_loss(self) -> float | None:
        return _mean([m.status.valid_loss for m in self.members.alive(self._steady())])

    def _on_missed(self, taken: Sequence[Followed]) -> None:
        for each in taken:
            left_out = _left_out(each.electorate, each.entry)
            self.rounds.add(each.entry, self._clock(), left_out=left_out, valid_loss=None)
        self._gaps = self.follower.store.gaps()
        self._publisher = Publisher()
        self._moved_on()

    def _moved_on(self) -> None:
        self._note_finished()
        self._tell_divergence()
        self._checkpoints.look(last=self.finished.is_set())

    async def reopen(self) -> bool:
        """Open a new epoch with whoever is there; False if nobody can vote."""
        now_s = self._steady()
        opened = await self._epochs.open(self.members.alive(now_s), now_s)
        self._note_started()
        return opened

    def _note_started(self) -> None:
        if self._started_s is None and self.follower.is_open:
            self._started_s = self._clock()
            self.follower.store.put_note("started", repr(self._started_s).encode())

    async def tick(self) -> None:
        """What time alone brings about; to be called every TICK_S."""
        now_s = self._steady()
        self._tell_gone(now_s)
        self.members.forget(now_s)
        alive = self.members.alive(now_s)
        self._epochs.note(alive, now_s)
        if not self.finished.is_set() and (self._logged or not self.follower.is_open):
            await self._epochs.look(alive, now_s, self._round_s(now_s))
            self._note_started()
        if self._catching_up is not None:
            self._catching_up.look(self._claimed(now_s), now_s)
        if self._models is not None:
            self._models.look(self._position(now_s), now_s)
        if now_s - self._saved_s > 5.0:
            self._saved_s = now_s
            await asyncio.to_thread(self._history.put_peers, self._statuses())

    async def close(self) -> None:
        """Write the last checkpoint and what is known of the peers."""
        await self._checkpoints.close()
        self._history.put_peers(self._statuses())

    # Status

    def status(self) -> RunStatus:
        """The run as it is now."""
        now_s, head = self._steady(), self.follower.head
        alive = [m.status for m in self.members.alive(now_s)]
        trainers = [s for s in alive if s.role == "trainer"]
        history = self.rounds.newest()
        return RunStatus(
            run_name=self.spec.run.name,
            run_id=self.run_id.hex(),
            state=self._state(now_s, alive),
            epoch=head.epoch,
            position=self._position(now_s),
            rounds_total=self.spec.run.rounds,
            min_peers=self.spec.round.min_peers,
            chain=head.chain.hex(),
            started_at=self._started_s,
            now=self._clock(),
            tokens_total=self.rounds.tokens_total,
            tokens_per_s=sum(s.tokens_per_s for s in trainers),
            loss=next((r.loss for r in reversed(history) if r.loss is not None), None),
            valid_loss=next((r.valid_loss for r in reversed(history) if r.valid_loss), None),
            utilisation=_mean([s.utilisation for s in trainers]) or 0.0,
            peers=[member.shown(now_s) for member in self.members.all()],
            history=history,
            gaps=[Gap(first=start + 1, last=stop) for start, stop in self._gaps[-MAX_GAPS:]],
            events=list(self._events),
            codec=self._codec,
            method=self.spec.outer.method,
            inner_steps=self.spec.outer.inner_steps,
            params=self.follower.state.layout.numel,
        )

    def head(self) -> Head:
        """The end of the log here."""
        return self.follower.head

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint on disk."""
        return self._checkpoints.last()

    # Inside

    def _expect_run(self, run_id: bytes) -> None:
        if run_id != self.run_id:
            raise Refusal(
                "failed_precondition",
                f"expected run {self.run_id.hex()[:12]}, got {run_id.hex()[:12]}: the invite is "
                "of another run",
            )

    def _expect_proof(self, request: JoinRequest) -> None:
        now_s = self._clock()
        fresh = self._sessions.is_nonce(request.nonce, request.peer_id, now_s, ttl_s=NONCE_TTL_S)
        payload = join_payload(self.run_id, request.nonce)
        if not fresh or not self._verify(request.peer_id, payload, request.signature):
            raise Refusal(
                "unauthenticated", "expected a fresh nonce signed by the key of the peer id"
            )

    def _admission_s(self) -> float:
        return self.spec.coordinator.admission_hours * 3600

    def _renewal(self, status: PeerStatus) -> bytes:
        left_s = self._admitted_until_s.get(status.peer_id, 0.0) - self._clock()
        return self.admit(status.peer_id, status.role) if left_s < self._admission_s() / 2 else b""

    def _publish_from(self, peer_id: str, now_s: float) -> int | None:
        if not self._logged:
            return None
        head = self.follower.head
        asked = self._publisher.asked(
            peer_id,
            self.members.alive(now_s),
            epoch=head.epoch,
            position=head.position,
            now_s=now_s,
        )
        return head.position if asked else None

    def _round_s(self, now_s: float) -> float:
        tokens = self.spec.step_tokens * self.spec.outer.inner_steps
        window = window_s(self.members.alive(now_s), tokens=tokens)
        return max(self.rounds.interval_s(), window)

    def _position(self, now_s: float) -> int:
        """How far the run is: the end of the log; by gossip where half of the trainers are."""
        head = self.follower.head
        if self._logged:
            return head.position
        return max(head.position, common_position(self.members.alive(now_s), epoch=head.epoch))

    def _claimed(self, now_s: float) -> int:
        """The highest position that anyone in touch claims to have."""
        epoch = self.follower.head.epoch
        alive = (m.status for m in self.members.alive(now_s))
        return max((s.position for s in alive if s.epoch == epoch), default=0)

    def _state(
        self, now_s: float, alive: Sequence[PeerStatus]
    ) -> Literal["waiting", "training", "stalled", "finished"]:
        if self.finished.is_set():
            return "finished"
        if not self.follower.is_open:
            return "waiting"
        stalled = self._epochs.is_stalled(now_s, self._round_s(now_s))
        return "stalled" if stalled or not alive else "training"

    def _is_finished(self) -> bool:
        rounds = self.spec.run.rounds
        return bool(rounds) and self.follower.head.position >= rounds

    def _note_finished(self) -> None:
        if self._is_finished() and not self.finished.is_set():
            self.finished.set()
            self._tell("info", f"finished: all {self.spec.run.rounds} rounds are done")

    def _tell_changes(self, before: Member | None, status: PeerStatus, *, leaving: bool) -> None:
        known = status.peer_id in self._alive
        if leaving:
            self._alive.discard(status.peer_id)
            if known:
                self._say("info", status.peer_id, "left")
            return
        self._alive.add(status.peer_id)
        if before and before.status.incarnation not in ("", status.incarnation):
            self._say("warning", status.peer_id, "was started again")
        elif before and not known:
            self._say("info", status.peer_id, "is back")

    def _tell_gone(self, now_s: float) -> None:
        alive = {m.status.peer_id for m in self.members.alive(now_s)}
        for peer_id in sorted(self._alive - alive):
            self._say("warning", peer_id, "is silent")
        self._alive &= alive

    def _tell_divergence(self) -> None:
        if self.follower.diverged and not self._diverged_told:
            self._diverged_told = True
            self._tell("error", self.follower.diverged)

    def _tell(self, level: Level, text: str) -> None:
        self._say(level, "coordinator", text)

    def _say(self, level: Level, source: str, text: str) -> None:
        self._add(Event(at=self._clock(), level=level, source=source[:128], text=text[:1000]))

    def _add(self, event: Event) -> None:
        self._events.append(event)
        self._history.add_event(event)

    def _statuses(self) -> list[PeerStatus]:
        return [member.status for member in self.members.all()]

    def _recall_peers(self) -> None:
        long_ago_s = self._steady() - 60.0
        for status in self._history.peers():
            self.members.update(status, long_ago_s)

    def _stored_start(self) -> float | None:
        note = self.follower.store.note("started")
        return float(note) if note else None


def _role(role: str) -> Literal["trainer", "follower"]:
    if role == "trainer":
        return "trainer"
    if role == "follower":
        return "follower"
    raise Refusal("invalid_argument", f"expected the role trainer or follower, got {role[:32]!r}")


def _same(one: bytes, other: bytes) -> bool:
    return hmac.compare_digest(one, other)


def _left_out(electorate: Sequence[Elector], entry: Entry) -> list[str]:
    counted = {member.peer_id for member in contributors(entry)}
    return [elector.peer_id for elector in electorate if elector.peer_id not in counted]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
