"""Admissions: the coordinator's signed permission for one peer to take part in a run.

    credential = payload | signature
    payload    = msgpack list [1, peer_id, role, run_id, issued_s, expires_s]
    signature  = 64 bytes, Ed25519 of the run's key over "atoll admission 1" | payload

A credential is public: it accompanies every exchange between peers. It is safe because the
transport has already authenticated the remote PeerID, and the credential names that PeerID. Times
are whole seconds since 1970 by the coordinator's clock.

Exceptions:

    Refused (atoll.dht)
        AdmissionRefused    code NOT_ADMITTED; the text gives the reason and the remedy
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused

Role = Literal["trainer", "follower", "keeper", "coordinator"]

MAX_CREDENTIAL_BYTES = 512  # about 190 are used
MAX_KNOWN = 4096  # checked credentials in memory: a signature takes longer than a look-up
CLOCK_SLACK_S = 60  # two clocks set from the coordinator's may still differ by this much
_SIGNATURE_BYTES = 64
_DOMAIN = b"atoll admission 1"


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

    def sign(self, key: Ed25519PrivateKey) -> bytes:
        """Return the signed credential."""
        fields = [1, self.peer_id, self.role, self.run_id, self.issued_s, self.expires_s]
        packed: Any = msgpack.packb(fields)
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
            version, peer_id, role, run_id, issued_s, expires_s = fields
        except Exception:  # msgpack raises several kinds
            raise AdmissionRefused("expected the six fields of an admission") from None
        if version != 1:
            raise AdmissionRefused(f"expected an admission of version 1, got {version!r:.20}")
        names = ("peer_id", "role", "run_id", "issued_s", "expires_s")
        values = zip(names, (peer_id, role, run_id, issued_s, expires_s), strict=True)
        admission = cls(**dict(values))
        try:
            _VALIDATOR.validate_python(admission)
        except ValidationError:
            raise AdmissionRefused("an admission has fields of a wrong type or range") from None
        return admission


_VALIDATOR = TypeAdapter(Admission)


class AdmissionCheck:
    """A transport's `check`: refuses every peer that presents no valid admission to this run.

    `clock` returns seconds since 1970 by the coordinator's clock; `is_evicted` returns if the
    organiser put a peer out, whose admission then counts no longer.
    """

    def __init__(
        self,
        run_key: bytes,
        run_id: bytes,
        *,
        clock: Callable[[], float] = time.time,
        is_evicted: Callable[[str], bool] = lambda peer_id: False,
    ) -> None:
        self._is_evicted = is_evicted
        self._run_key = run_key
        self._run_id = run_id
        self._clock = clock
        self._known: dict[str, tuple[bytes, Admission]] = {}
        self._lock = threading.Lock()  # the DHT's records are verified in a thread

    def __call__(self, remote: str, credential: bytes) -> float:
        """Return until when `remote` is admitted, or raise AdmissionRefused."""
        return self.check(remote, credential).expires_s + CLOCK_SLACK_S

    def check(self, remote: str, credential: bytes) -> Admission:
        """Return the admission of `remote`, a PeerID that the transport authenticated.

        Raises:
            AdmissionRefused: it is absent, forged, expired, or names another peer or run; or the
                peer was evicted.
        """
        if self._is_evicted(remote):
            raise AdmissionRefused("the organiser has evicted this peer")
        known = self._known.get(remote)
        if known is None or known[0] != credential:
            known = (credential, self._open(remote, credential))
            with self._lock:
                if len(self._known) >= MAX_KNOWN:
                    self._known.pop(next(iter(self._known)))
                self._known[remote] = known
        late_s = self._clock() - known[1].expires_s
        if late_s > CLOCK_SLACK_S:
            raise AdmissionRefused(
                f"the admission expired {late_s:.0f} s ago; the peer must renew it at the "
                "coordinator"
            )
        return known[1]

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
