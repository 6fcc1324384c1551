"""Admission control: nonces, admissions, sessions and the invite's token.

Exceptions:

    Refusal      `status` is for programs, the text for people at the other side
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from typing import Literal

from atoll.coordinator import notices
from atoll.coordinator.history import EventLog
from atoll.coordinator.invites import (
    InviteDesk,
    InviteRefused,
    InviteRevoked,
    InvitesError,
    keep,
    listed,
    revoke,
)
from atoll.coordinator.policies import ReportLimit
from atoll.coordinator.presence import MAX_PEERS
from atoll.coordinator.rpc.messages import NONCE_TTL_S, PROTOCOL, join_payload
from atoll.coordinator.run.admission import (
    CLOCK_SLACK_S,
    MAX_INVITE_CHARS,
    Admission,
    Role,
)
from atoll.coordinator.run.eviction import sign_evictions
from atoll.coordinator.run.invite_request import (
    ORGANISER,
    InviteRequest,
    InviteRequestInvalid,
    ListedInvite,
    pack_list,
)
from atoll.coordinator.run.keys import RunKeys
from atoll.coordinator.run.notice import Notice
from atoll.coordinator.run.releases import MAX_RELEASE_CHARS, is_newer
from atoll.coordinator.run.sections import CoordinatorSection
from atoll.coordinator.run.status import Event
from atoll.optim.log.entry import Verify

EVENT_BURST = 64.0  # what a peer kept while the coordinator was away: two heartbeats' worth
EVENTS_PER_S = 1.0  # far above what people can read
_NONCE_BYTES = 32  # 8 of time, 8 random, 16 of the HMAC
_SESSION_HEAD = struct.Struct(">QB")  # expiry, and whether the peer is a follower
_MAC_BYTES = 32


class RefusalStatus(StrEnum):
    """The gRPC statuses with which the coordinator refuses, by their gRPC names."""

    UNAUTHENTICATED = "unauthenticated"
    PERMISSION_DENIED = "permission_denied"
    FAILED_PRECONDITION = "failed_precondition"
    INVALID_ARGUMENT = "invalid_argument"
    NOT_FOUND = "not_found"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    ABORTED = "aborted"  # for ever: the organiser has put the caller out


class Refusal(Exception):
    """The coordinator refuses a request."""

    def __init__(self, status: RefusalStatus, message: str) -> None:
        """`message` is sent to the other side."""
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class SessionTerms:
    """The terms on which a peer joined, which its session carries."""

    is_follower: bool = False
    invite: str = ""
    """Id of the invite by which it joined; empty without one."""


class SessionTokens:
    """Nonces and session tokens of one coordinator, without a table: HMACs under its secret.

        nonce    u64 big-endian milliseconds | 8 random bytes | first 16 bytes of HMAC-SHA256
        session  u64 big-endian seconds of expiry | u8 1 of a follower, else 0 |
                 id of the invite, 0 to 16 characters | HMAC-SHA256

    The HMACs cover the PeerID, and those of sessions the protocol. As the secret is on disk, tokens
    outlive a restart; but a peer of another protocol than the coordinator's has to join again, and
    is refused with the reason.
    """

    def __init__(self, secret: bytes) -> None:
        """`secret` is 32 random bytes."""
        self._secret = secret

    def nonce(self, peer_id: str, now_s: float) -> bytes:
        """Return a nonce for `peer_id` to sign."""
        head = struct.pack(">Q", int(now_s * 1000)) + secrets.token_bytes(8)
        return head + self._mac(b"nonce", peer_id, head)[:16]

    def is_nonce(self, nonce: bytes, peer_id: str, now_s: float, *, ttl_s: float) -> bool:
        """Return True if we made the nonce for this peer within the last `ttl_s`."""
        if len(nonce) != _NONCE_BYTES:
            return False
        head, mac = nonce[:16], nonce[16:]
        age_s = now_s - struct.unpack(">Q", head[:8])[0] / 1000
        expected = self._mac(b"nonce", peer_id, head)[:16]
        return hmac.compare_digest(mac, expected) and abs(age_s) <= ttl_s

    def session(self, peer_id: str, expires_s: float, terms: SessionTerms) -> bytes:
        """Return the secret token of `peer_id`."""
        head = _SESSION_HEAD.pack(int(expires_s), terms.is_follower) + terms.invite.encode()
        return head + self._mac(_session_use(), peer_id, head)

    def open(self, session: bytes, peer_id: str, now_s: float) -> SessionTerms | None:
        """Return what a token of `peer_id` says; None unless it is one, and current."""
        size = len(session) - _MAC_BYTES
        if not _SESSION_HEAD.size <= size <= _SESSION_HEAD.size + MAX_INVITE_CHARS:
            return None
        head, mac = session[:size], session[size:]
        if not hmac.compare_digest(mac, self._mac(_session_use(), peer_id, head)):
            return None
        expires_s, is_follower = _SESSION_HEAD.unpack_from(head)
        invite = head[_SESSION_HEAD.size :].decode()
        return (
            SessionTerms(is_follower=bool(is_follower), invite=invite)
            if now_s <= expires_s
            else None
        )

    def _mac(self, use: bytes, peer_id: str, head: bytes) -> bytes:
        # `use` keeps a nonce from passing as a session.
        message = use + b"\0" + peer_id.encode(errors="replace") + b"\0" + head
        return hmac.digest(self._secret, message, hashlib.sha256)


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """A peer's request to join."""

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
    """The reply to one peer that joins, without what all get."""

    admission: bytes
    session: bytes


class AdmissionControl:
    """Admits peers, and authenticates those it has admitted."""

    def __init__(
        self,
        settings: CoordinatorSection,
        keys: RunKeys,
        run_id: bytes,
        *,
        desk: InviteDesk,
        has_keepers: bool = False,
        verify: Verify,
        events: EventLog,
        on_joined: Callable[[str], None] = lambda peer_id: None,
        ordered_out: Callable[[], Mapping[str, str] | None] = lambda: None,
        clock: Callable[[], float],
        steady: Callable[[], float],
    ) -> None:
        """`clock` returns seconds since 1970, `steady` those of a monotonic clock.

        `on_joined` takes the PeerID of each peer that joins. `ordered_out` returns why orders have
        put each PeerID out; None in a run without such orders.
        """
        self._has_keepers = has_keepers
        self._settings = settings
        self._keys = keys
        self._run_id = run_id
        self._desk = desk
        self._verify = verify
        self._events = events
        self._on_joined = on_joined
        self._ordered_out = ordered_out
        self._clock = clock
        self._steady = steady
        self._sessions = SessionTokens(keys.session_secret)
        self._evictions: tuple[tuple[list[str], list[str]], bytes] | None = None
        self._event_limits: dict[str, ReportLimit] = {}
        self._limits: dict[str, ReportLimit] = {}
        self._admitted_until_s: dict[str, float] = {}
        self._terms: dict[str, SessionTerms] = {}
        """By PeerID, of the peers that have called; each call brings them again."""

    def challenge(self, peer_id: str) -> bytes:
        """Return a nonce for `peer_id` to sign."""
        return self._sessions.nonce(peer_id, self._clock())

    def join(self, request: JoinRequest) -> Welcome:
        """Admit a peer. Raises Refusal."""
        if request.protocol != PROTOCOL:
            raise Refusal(
                RefusalStatus.FAILED_PRECONDITION,
                f"expected protocol {PROTOCOL}, got {request.protocol}: this run's coordinator is "
                f"of Atoll {version('atoll')}; install that version here",
            )
        self._expect_run(request.run_id)
        self._expect_proof(request)
        _expect_role(request.role)
        terms = self._expect_invited(request)
        self._note(request.peer_id, terms)
        role = self.role_of(request.peer_id, request.role)
        self._events.add("info", request.peer_id, _joined(role, request.version))
        self._on_joined(request.peer_id)
        expires_s = self._clock() + self._admission_s()
        session = self._sessions.session(request.peer_id, expires_s, terms)
        return Welcome(admission=self.admit(request.peer_id, role), session=session)

    def admit(self, peer_id: str, role: Role) -> bytes:
        """Return a new credential."""
        now_s = self._clock()
        expires_s = now_s + self._admission_s()
        if len(self._admitted_until_s) > 2 * MAX_PEERS:
            # Anyone can join under invented names. Peers online get another with their next report.
            self._admitted_until_s.clear()
        self._admitted_until_s[peer_id] = expires_s
        admission = Admission(
            peer_id=peer_id,
            role=role,
            run_id=self._run_id,
            issued_s=int(now_s),
            expires_s=int(expires_s),
            invite=self._terms.get(peer_id, SessionTerms()).invite,
        )
        return admission.sign(self._keys.signer)

    def renewed(self, peer_id: str, role: Role) -> bytes:
        """Return a new credential at half the life of the last one; empty before."""
        left_s = self._admitted_until_s.get(peer_id, 0.0) - self._clock()
        return self.admit(peer_id, role) if left_s < self._admission_s() / 2 else b""

    def role_of(self, peer_id: str, claimed: str) -> Literal["trainer", "follower", "keeper"]:
        """Return a peer's role: its invite makes a keeper or a trainer, no word of its own does.

        A coordinator that was restored may have forgotten who has used an invite. The session,
        which outlives that, names it.
        """
        terms = self._terms.get(peer_id, SessionTerms())
        if self._has_keepers and self._desk.is_keeper(peer_id, by=terms.invite):
            return "keeper"
        return "follower" if terms.is_follower or claimed == "follower" else "trainer"

    def authenticate(self, peer_id: str, session: bytes) -> None:
        """Raise Refusal unless this is a current session of the peer, by an invite that counts."""
        terms = self._sessions.open(session, peer_id, self._clock())
        if terms is None:
            raise Refusal(RefusalStatus.UNAUTHENTICATED, "no current session; join first")
        self._expect_not_evicted(peer_id)
        if self._desk.is_revoked(terms.invite):
            raise Refusal(RefusalStatus.ABORTED, str(InviteRevoked()))
        self._note(peer_id, terms)

    def _note(self, peer_id: str, terms: SessionTerms) -> None:
        """Remember what a peer's session says; an authenticated call has just said it."""
        if len(self._terms) > 2 * MAX_PEERS:
            self._terms.clear()
        self._terms[peer_id] = terms

    def limit_reports(self, peer_id: str) -> None:
        """Raise Refusal if an authenticated peer reports far too often."""
        if len(self._limits) > 2 * MAX_PEERS:  # invented names; a cleared limit allows one burst
            self._limits.clear()
        if not self._limits.setdefault(peer_id, ReportLimit()).take(self._steady()):
            raise Refusal(RefusalStatus.RESOURCE_EXHAUSTED, "too many reports; slow down")

    def paced(self, peer_id: str, events: Sequence[Event]) -> Sequence[Event]:
        """Return the events that a peer may log now; the others are dropped.

        Each is a write to the disk, for people. A peer in trouble throttles its own messages.
        """
        if len(self._event_limits) > 2 * MAX_PEERS:
            self._event_limits.clear()
        limit = self._event_limits.get(peer_id)
        if limit is None:
            limit = ReportLimit(
                left=EVENT_BURST, at_s=self._steady(), burst=EVENT_BURST, per_s=EVENTS_PER_S
            )
            self._event_limits[peer_id] = limit
        return [event for event in events if limit.take(self._steady())]

    def expect_token(self, token: bytes, viewer: bytes = b"") -> None:
        """Raise Refusal if the run is invite-only and this is no token of a current invite."""
        if self._settings.invite_only:
            with _refusing():
                self._desk.refresh()
                self._desk.watch(token, self._clock(), viewer)

    async def manage_invites(
        self, data: bytes, signature: bytes, verify_organiser: Callable[[bytes, bytes], bool]
    ) -> bytes:
        """Do what the organiser's key asks about invites; return all of them as JSON.

        `verify_organiser(data, signature)` checks a signature of that key. Raises Refusal.
        """
        try:
            request = InviteRequest.open(data, signature, verify_organiser)
        except InviteRequestInvalid as error:
            raise Refusal(RefusalStatus.PERMISSION_DENIED, str(error)) from None
        self._expect_run(bytes.fromhex(request.run_id))
        nonce = bytes.fromhex(request.nonce)
        if not self._sessions.is_nonce(nonce, ORGANISER, self._clock(), ttl_s=NONCE_TTL_S):
            raise Refusal(RefusalStatus.UNAUTHENTICATED, "expected a fresh nonce; ask again")
        try:
            # In a thread: a command may hold the lock of the file.
            invites = await asyncio.to_thread(self._manage, request)
        except InvitesError as error:
            raise Refusal(RefusalStatus.INVALID_ARGUMENT, str(error)) from None
        except OSError as error:
            raise Refusal(
                RefusalStatus.RESOURCE_EXHAUSTED,
                f"the coordinator cannot write to its disk: {error}; free space there",
            ) from None
        return pack_list(invites)

    def _manage(self, request: InviteRequest) -> list[ListedInvite]:
        folder = self._desk.folder
        if request.issue is not None:
            keep(folder, request.issue)
        if request.revoke:
            revoke(folder, request.revoke, self._keys.token, at_s=self._clock())
        return [ListedInvite.of(invite, joined) for invite, joined in listed(folder)]

    def evicted(self) -> bytes:
        """Return the signed list of peers that are out, and of revoked invites; empty if none."""
        now_s = self._clock()
        # An older eviction needs no word to the peers: the admission that it ended has expired.
        since_s = now_s - self._admission_s() - CLOCK_SLACK_S
        listed, invites = self._desk.evicted(since_s), self._desk.revoked(since_s)
        ordered = self._ordered_out()
        peer_ids = sorted({*listed, *(ordered or ())})
        # An empty list tells that a peer may come back.
        if not peer_ids and not invites and ordered is None:
            return b""
        if not self._evictions or self._evictions[0] != (peer_ids, invites):
            record = sign_evictions(
                peer_ids, invites, run_id=self._run_id, issued_s=int(now_s), key=self._keys.signer
            )
            self._evictions = ((peer_ids, invites), record)
        return self._evictions[1]

    def refresh(self) -> list[str]:
        """Take up what the organiser changed; return the PeerIDs that are put out by it."""
        self._desk.refresh()
        new, revoked = self._desk.news()
        for eviction in new:
            self._admitted_until_s.pop(eviction.peer_id, None)
            put_out = notices.peer_evicted(peer=eviction.peer_id, reason=eviction.reason)
            self._events.report("warning", put_out)
        out = [eviction.peer_id for eviction in new]
        for invite in revoked:
            its = [peer for peer, each in self._terms.items() if each.invite == invite]
            self._events.report("warning", notices.invite_revoked(invite=invite, peers=len(its)))
            out += its
        return out

    def evict(self, peer_id: str, reason: str) -> None:
        """Put a peer out; `refresh` reports it. Raises OSError and InvitesError."""
        self._desk.evict(peer_id, at_s=self._clock(), reason=reason)

    def readmit(self, peer_id: str) -> None:
        """Take a peer off the list of the organiser's commands. Raises OSError and InvitesError."""
        self._desk.readmit(peer_id)

    def is_evicted(self, peer_id: str) -> bool:
        """Return True if the organiser put this peer out, or revoked its invite."""
        terms = self._terms.get(peer_id, SessionTerms())
        return self._reason_out(peer_id) is not None or self._desk.is_revoked(terms.invite)

    def is_revoked(self, invite: str) -> bool:
        """Return True if the organiser revoked an invite."""
        return self._desk.is_revoked(invite)

    def _reason_out(self, peer_id: str) -> str | None:
        """Return why the organiser put a peer out; None if it is not out."""
        ordered = self._ordered_out() or {}
        return ordered.get(peer_id, self._desk.reason_out(peer_id))

    def _expect_not_evicted(self, peer_id: str) -> None:
        reason = self._reason_out(peer_id)
        if reason is not None:
            why = f": {reason}" if reason else ""
            raise Refusal(
                RefusalStatus.ABORTED,
                f"the organiser has evicted this peer{why}; ask the organiser to readmit it",
            )

    def _expect_invited(self, request: JoinRequest) -> SessionTerms:
        """Return what a peer's invite makes of it. Raises Refusal."""
        kind = self._desk.kind_of(request.token)
        self._expect_not_evicted(request.peer_id)
        if kind == "keeper" and not self._has_keepers:
            raise Refusal(
                RefusalStatus.PERMISSION_DENIED,
                "the invite is for keepers, but in this run members vote "
                '(round.electors = "members"); ask the organiser for one for trainers',
            )
        is_follower = request.role == "follower"
        if kind == "follower" and not is_follower:
            raise Refusal(
                RefusalStatus.PERMISSION_DENIED,
                "the invite is for followers, which do not train; ask the organiser for one for "
                "trainers",
            )
        # Anyone may train in an open run; an invite that says less is taken at its word.
        if not self._settings.invite_only and kind in (None, "trainer"):
            return SessionTerms(is_follower=is_follower)
        with _refusing():
            invite = self._desk.join(request.token, request.peer_id, self._clock())
        return SessionTerms(is_follower=is_follower, invite=invite.id)

    def _expect_run(self, run_id: bytes) -> None:
        if run_id != self._run_id:
            raise Refusal(
                RefusalStatus.FAILED_PRECONDITION,
                f"expected run {self._run_id.hex()[:12]}, got {run_id.hex()[:12]}: the invite is "
                "of another run",
            )

    def _expect_proof(self, request: JoinRequest) -> None:
        now_s = self._clock()
        fresh = self._sessions.is_nonce(request.nonce, request.peer_id, now_s, ttl_s=NONCE_TTL_S)
        payload = join_payload(self._run_id, request.nonce)
        if not fresh or not self._verify(request.peer_id, payload, request.signature):
            raise Refusal(
                RefusalStatus.UNAUTHENTICATED,
                "expected a fresh nonce signed by the key of the peer id",
            )

    def _admission_s(self) -> float:
        return self._settings.admission_hours * 3600


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except InviteRevoked as error:  # for ever: a peer that was in the run ends
        raise Refusal(RefusalStatus.ABORTED, str(error)) from None
    except OSError as error:
        raise Refusal(
            RefusalStatus.RESOURCE_EXHAUSTED,
            f"the coordinator cannot note this use of the invite: {error}; free space there",
        ) from None
    except InviteRefused as error:
        raise Refusal(RefusalStatus.PERMISSION_DENIED, str(error)) from None


def _session_use() -> bytes:
    """Return what a MAC of a session is for: sessions of another protocol are none."""
    return b"session %d" % PROTOCOL


def _joined(role: str, theirs: str) -> Notice:
    """Return what an organiser reads of a peer with a version, which may be anything."""
    ours, theirs = version("atoll"), theirs[:MAX_RELEASE_CHARS]
    newer_than = ours if is_newer(theirs, ours) else None
    return notices.peer_joined(role=role, version=theirs, newer_than=newer_than)


def _expect_role(role: str) -> None:
    if role not in ("trainer", "follower"):
        raise Refusal(
            RefusalStatus.INVALID_ARGUMENT,
            f"expected the role trainer or follower, got {role[:32]!r}",
        )
