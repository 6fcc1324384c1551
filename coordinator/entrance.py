"""Who may enter a run, and who is who in it: nonces, admissions, sessions, the invite's token.

Exceptions:

    Refusal      `status` is for programs, the text for people on the other side
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from atoll.coordinator.journal import Journal
from atoll.coordinator.members import MAX_MEMBERS, Pace
from atoll.coordinator.rpc.messages import NONCE_TTL_S, PROTOCOL, join_payload
from atoll.coordinator.run.admission import Admission, Role
from atoll.coordinator.run.keys import RunKeys
from atoll.coordinator.run.sections import CoordinatorSection
from atoll.coordinator.sessions import Sessions
from atoll.optim.log.entry import Verify


class RefusalStatus(StrEnum):
    """The gRPC statuses by which the coordinator refuses, under their gRPC names."""

    UNAUTHENTICATED = "unauthenticated"
    PERMISSION_DENIED = "permission_denied"
    FAILED_PRECONDITION = "failed_precondition"
    INVALID_ARGUMENT = "invalid_argument"
    NOT_FOUND = "not_found"
    RESOURCE_EXHAUSTED = "resource_exhausted"


class Refusal(Exception):  # noqa: N818
    """A request that is answered with no."""

    def __init__(self, status: RefusalStatus, message: str) -> None:
        """`message` goes to the other side."""
        super().__init__(message)
        self.status = status


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


class Entrance:
    """Lets peers in, and knows them again."""

    def __init__(
        self,
        settings: CoordinatorSection,
        keys: RunKeys,
        run_id: bytes,
        *,
        verify: Verify,
        journal: Journal,
        clock: Callable[[], float],
        steady: Callable[[], float],
    ) -> None:
        """`clock` tells the time, `steady` measures it."""
        self._settings = settings
        self._keys = keys
        self._run_id = run_id
        self._verify = verify
        self._journal = journal
        self._clock = clock
        self._steady = steady
        self._sessions = Sessions(keys.session_secret)
        self._paces: dict[str, Pace] = {}
        self._admitted_until_s: dict[str, float] = {}

    def challenge(self, peer_id: str) -> bytes:
        """A nonce for `peer_id` to sign."""
        return self._sessions.nonce(peer_id, self._clock())

    def join(self, request: JoinRequest) -> Welcome:
        """Admit a peer. Raises Refusal."""
        if request.protocol != PROTOCOL:
            raise Refusal(
                RefusalStatus.FAILED_PRECONDITION,
                f"expected protocol {PROTOCOL}, got {request.protocol}: use the organiser's "
                "version of Atoll",
            )
        self._expect_run(request.run_id)
        self._expect_proof(request)
        self.expect_token(request.token)
        role = _role(request.role)
        text = f"joined as {role} (version {request.version[:32]})"
        self._journal.say("info", request.peer_id, text)
        session = self._sessions.session(request.peer_id, self._clock() + self._admission_s())
        return Welcome(admission=self.admit(request.peer_id, role), session=session)

    def admit(self, peer_id: str, role: Role) -> bytes:
        """A fresh credential."""
        now_s = self._clock()
        expires_s = now_s + self._admission_s()
        if len(self._admitted_until_s) > 2 * MAX_MEMBERS:
            self._admitted_until_s.clear()  # whoever is here gets another with its next report
        self._admitted_until_s[peer_id] = expires_s
        admission = Admission(
            peer_id=peer_id,
            role=role,
            run_id=self._run_id,
            issued_s=int(now_s),
            expires_s=int(expires_s),
        )
        return admission.sign(self._keys.signer)

    def renewed(self, peer_id: str, role: Role) -> bytes:
        """A fresh credential at half the life of the last one; empty before."""
        left_s = self._admitted_until_s.get(peer_id, 0.0) - self._clock()
        return self.admit(peer_id, role) if left_s < self._admission_s() / 2 else b""

    def authenticate(self, peer_id: str, session: bytes) -> None:
        """Raises Refusal unless this is the peer's current session."""
        if not self._sessions.is_session(session, peer_id, self._clock()):
            raise Refusal(RefusalStatus.UNAUTHENTICATED, "expected a current session: join first")

    def expect_pace(self, peer_id: str) -> None:
        """Raises Refusal when an authenticated peer reports far too often."""
        if len(self._paces) > 2 * MAX_MEMBERS:
            self._paces.clear()
        if not self._paces.setdefault(peer_id, Pace()).take(self._steady()):
            raise Refusal(RefusalStatus.RESOURCE_EXHAUSTED, "expected fewer reports; slow down")

    def expect_token(self, token: bytes) -> None:
        """Raises Refusal if the run is closed and this is not its token."""
        if self._settings.invite_only and not hmac.compare_digest(token, self._keys.token):
            raise Refusal(
                RefusalStatus.PERMISSION_DENIED,
                "expected the token of this run's invite; ask the organiser for an invite",
            )

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


def _role(role: str) -> Literal["trainer", "follower"]:
    if role == "trainer":
        return "trainer"
    if role == "follower":
        return "follower"
    raise Refusal(
        RefusalStatus.INVALID_ARGUMENT, f"expected the role trainer or follower, got {role[:32]!r}"
    )
