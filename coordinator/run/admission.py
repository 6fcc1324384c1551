"""Admissions: the coordinator's signed permission for one peer to take part in a run.

    credential = payload | signature
    payload    = msgpack list [2, peer_id, role, run_id, issued_s, expires_s, invite]
    signature  = 64 bytes, Ed25519 of the run's key over "atoll admission 2" | payload

A credential is public: it accompanies every exchange between peers. It is safe because the
transport has already authenticated the remote PeerID, and the credential names that PeerID. Times
are whole seconds since 1970 by the coordinator's clock. `invite` is the id of the invite by which
the peer joined, or empty: once the organiser has revoked that invite, the admission counts no more.

A follower may read the log, and nothing else: `FOLLOWER_USES` lists the methods that it may call,
and a method that is not listed is none of them.

Exceptions:

    Refused (atoll.dht)
        AdmissionRefused    code NOT_ADMITTED; the text gives the reason and the remedy
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Self

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused

Role = Literal["trainer", "follower", "keeper", "coordinator"]

FOLLOWER_USES = frozenset(
    {
        # where the others stand, and who they are
        "ping", "head", "roster", "gossip-head", "relocation",
        # the log, its snapshots, and a model by gossip
        "part", "headers", "body", "digests", "leaves", "gossip-snapshot", "gossip-leaves",
        # the link, for `atoll doctor` and between routers
        "measure", "punch",
        # texts, of peers whose owners serve them
        "text",
        "record:follower", "record:left",
    }
)  # fmt: skip
"""What a follower's admission is good for at other peers."""

LATE_USE = ("coordinator", "relocation")
"""For what, and whose, an admission counts after its end: what it brings has its own signature.

A coordinator whose clock was ahead has set those of all peers. To them its successor, by the right
clock, comes too late until they have heard where it is.
"""

MAX_CREDENTIAL_BYTES = 512  # about 200 are used
MAX_INVITE_CHARS = 16  # of an invite's id
MAX_KNOWN = 4096  # checked credentials in memory: a signature takes longer than a look-up
CLOCK_SLACK_S = 60  # two clocks set from the coordinator's may still differ by this much
_SIGNATURE_BYTES = 64
_VERSION = 2
_DOMAIN = b"atoll admission 2"


class AdmissionRefused(Refused):
    """The credential does not admit the peer that presents it."""

    def __init__(self, message: str) -> None:
        super().__init__(RefusalCode.NOT_ADMITTED, message)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """One peer's permission to take part in one run, in one role, until a given time."""

    __pydantic_config__ = ConfigDict(strict=True, revalidate_instances="always")

    peer_id: Annotated[str, Field(min_length=1, max_length=128)]
    role: Role
    run_id: Annotated[bytes, Field(min_length=32, max_length=32)]
    issued_s: Annotated[int, Field(ge=0, lt=2**53)]
    expires_s: Annotated[int, Field(ge=0, lt=2**53)]
    invite: Annotated[str, Field(max_length=MAX_INVITE_CHARS)] = ""
    """Id of the invite by which the peer joined; empty without one."""

    def sign(self, key: Ed25519PrivateKey) -> bytes:
        """Return the signed credential."""
        fields = [self.peer_id, self.role, self.run_id, self.issued_s, self.expires_s, self.invite]
        packed: Any = msgpack.packb([_VERSION, *fields])
        payload = bytes(packed)
        return payload + key.sign(_DOMAIN + payload)

    @classmethod
    def open(cls, credential: bytes, run_key: bytes) -> Self:
        """Check the run key's signature and decode a credential. Raises AdmissionRefused."""
        if not _SIGNATURE_BYTES < len(credential) <= MAX_CREDENTIAL_BYTES:
            raise AdmissionRefused(
                f"expected an admission of at most {MAX_CREDENTIAL_BYTES} bytes, "
                f"got {len(credential)}"
            )
        payload, signature = credential[:-_SIGNATURE_BYTES], credential[-_SIGNATURE_BYTES:]
        try:
            Ed25519PublicKey.from_public_bytes(run_key).verify(signature, _DOMAIN + payload)
        except (InvalidSignature, ValueError):
            raise AdmissionRefused(
                "expected an admission signed by this run's key; join with the run's invite"
            ) from None
        return cls._read(payload)

    @classmethod
    def _read(cls, payload: bytes) -> Self:
        try:
            fields = msgpack.unpackb(payload, raw=False, use_list=False)
            version, *values = fields
        except Exception:  # msgpack raises several kinds
            raise AdmissionRefused("expected the fields of an admission") from None
        if version != _VERSION or len(values) != len(_NAMES):
            raise AdmissionRefused(
                f"expected an admission of version {_VERSION}, got {version!r:.20}"
            )
        admission = cls(**dict(zip(_NAMES, values, strict=True)))
        try:
            _VALIDATOR.validate_python(admission)
        except ValidationError:
            raise AdmissionRefused("an admission has fields of a wrong type or range") from None
        return admission


_VALIDATOR = TypeAdapter(Admission)
_NAMES = tuple(field.name for field in fields(Admission))


class AdmissionCheck:
    """A transport's `check`: refuses every peer that presents no valid admission to this run.

    `clock` returns seconds since 1970 by the coordinator's clock; `is_evicted` returns if the
    organiser put a peer out, and `is_revoked` if it revoked an invite: such admissions count no
    longer.
    """

    def __init__(
        self,
        run_key: bytes,
        run_id: bytes,
        *,
        clock: Callable[[], float] = time.time,
        is_evicted: Callable[[str], bool] = lambda peer_id: False,
        is_revoked: Callable[[str], bool] = lambda invite: False,
    ) -> None:
        self._is_evicted = is_evicted
        self._is_revoked = is_revoked
        self._run_key = run_key
        self._run_id = run_id
        self._clock = clock
        self._known: dict[str, tuple[bytes, Admission]] = {}
        self._lock = threading.Lock()  # the DHT's records are verified in a thread

    def __call__(self, remote: str, credential: bytes, /, use: str = "") -> float:
        """Return until when `remote` is admitted, or raise AdmissionRefused; see `Check`."""
        admission = self._check(remote, credential, use)
        _expect_use(admission.role, use)
        return admission.expires_s + CLOCK_SLACK_S

    def is_out(self, peer_id: str) -> bool:
        """Return whether a peer was put out, itself or by its invite, as its admission names it.

        Of peers that have shown none, only evictions are known.
        """
        known = self._known.get(peer_id)
        return self._is_evicted(peer_id) or (
            known is not None and self._is_revoked(known[1].invite)
        )

    def check(self, remote: str, credential: bytes) -> Admission:
        """Return the admission of `remote`, a PeerID that the transport authenticated.

        Raises:
            AdmissionRefused: it is absent, forged, expired, or names another peer or run; or the
                peer was evicted, or its invite revoked.
        """
        return self._check(remote, credential, "")

    def _check(self, remote: str, credential: bytes, use: str) -> Admission:
        if self._is_evicted(remote):
            raise AdmissionRefused("the organiser has evicted this peer")
        known = self._known.get(remote)
        if known is None or known[0] != credential:
            known = (credential, self._open(remote, credential))
            self._remember(remote, *known)
        if self._is_revoked(known[1].invite):
            raise AdmissionRefused(
                f"the organiser has revoked the invite {known[1].invite}, by which this peer joined"
            )
        late_s = self._clock() - known[1].expires_s
        if late_s > CLOCK_SLACK_S and (known[1].role, use) != LATE_USE:
            raise AdmissionRefused(
                f"the admission expired {late_s:.0f} s ago; the peer must renew it at the "
                "coordinator"
            )
        return known[1]

    def _remember(self, remote: str, credential: bytes, admission: Admission) -> None:
        """Keep a peer's newest admission: an older one says nothing of the invite it has now."""
        with self._lock:
            before = self._known.pop(remote, None)
            if before is not None and before[1].issued_s > admission.issued_s:
                credential, admission = before
            elif len(self._known) >= MAX_KNOWN:
                self._known.pop(next(iter(self._known)))
            self._known[remote] = (credential, admission)

    def _open(self, remote: str, credential: bytes) -> Admission:
        admission = Admission.open(credential, self._run_key)
        if admission.run_id != self._run_id:
            raise AdmissionRefused(
                f"expected an admission of run {self._run_id.hex()[:12]}, "
                f"got one of run {admission.run_id.hex()[:12]}"
            )
        if admission.peer_id != remote:
            raise AdmissionRefused(
                f"expected an admission of {remote[:64]}, got one of {admission.peer_id[:64]}"
            )
        return admission


def _expect_use(role: Role, use: str) -> None:
    """Raise AdmissionRefused if a role is not good for what its peer wants to do."""
    method = use.partition("@")[0]  # behind it, a module's name
    if role == "follower" and method and method not in FOLLOWER_USES:
        raise AdmissionRefused(
            f"the admission is a follower's, which may read the log and not use {method[:64]}; "
            "train with an invite for trainers"
        )
