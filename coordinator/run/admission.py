"""Admissions: the run's word that a peer may take part.

    credential = payload | signature
    payload    = msgpack list [1, peer_id, role, run_id, issued_s, expires_s]
    signature  = 64 bytes, Ed25519 of the run's key over "atoll admission 1" | payload

A credential is public: it goes with every exchange between peers. What makes it safe is that the
transport has already authenticated the remote PeerID, and the credential names it. Times are whole
seconds since 1970 by the coordinator's clock.

Exceptions:

    Refused (atoll.dht)
      AdmissionRefused    code NOT_ADMITTED; the text says why and what to do
"""

from __future__ import annotations

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

Role = Literal["trainer", "follower", "coordinator"]

MAX_CREDENTIAL_BYTES = 512  # about 190 are used
CLOCK_SLACK_S = 60  # by which two clocks that were set by the coordinator's may still differ
_SIGNATURE_BYTES = 64
_DOMAIN = b"atoll admission 1"


class AdmissionRefused(Refused):
    """A credential that does not admit the peer that shows it."""

    def __init__(self, message: str) -> None:
        """Keep the reason; the code is the transport's own."""
        super().__init__(RefusalCode.NOT_ADMITTED, message)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Who may take part in which run, as what, until when."""

    __pydantic_config__ = ConfigDict(strict=True, revalidate_instances="always")

    peer_id: Annotated[str, Field(min_length=1, max_length=128)]
    role: Role
    run_id: Annotated[bytes, Field(min_length=32, max_length=32)]
    issued_s: Annotated[int, Field(ge=0, lt=2**53)]
    expires_s: Annotated[int, Field(ge=0, lt=2**53)]

    def sign(self, key: Ed25519PrivateKey) -> bytes:
        """Return the credential."""
        payload = self._payload()
        return payload + key.sign(_DOMAIN + payload)

    @classmethod
    def open(cls, credential: bytes, run_key: bytes) -> Self:
        """Read a credential that the run's public key signed. Raises AdmissionRefused."""
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
                "expected an admission signed by this run's key; join by the run's invite"
            ) from None
        return cls._read(payload)

    def _payload(self) -> bytes:
        fields = [1, self.peer_id, self.role, self.run_id, self.issued_s, self.expires_s]
        packed: Any = msgpack.packb(fields)
        return bytes(packed)

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
            raise AdmissionRefused("expected the fields of an admission, got others") from None
        return admission


_VALIDATOR = TypeAdapter(Admission)


class AdmissionCheck:
    """The `check` of a transport: who shows no valid admission of this run is refused."""

    def __init__(
        self, run_key: bytes, run_id: bytes, *, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` gives seconds since 1970 as the coordinator counts them."""
        self._run_key = run_key
        self._run_id = run_id
        self._clock = clock
        self._known: dict[str, tuple[bytes, Admission]] = {}

    def __call__(self, remote: str, credential: bytes) -> None:
        """Return if `remote` is admitted. Raises AdmissionRefused."""
        self.check(remote, credential)

    def check(self, remote: str, credential: bytes) -> Admission:
        """Return the admission of `remote`, a PeerID that the transport authenticated.

        Raises:
            AdmissionRefused: absent, forged, expired, of another peer or run.
        """
        known = self._known.get(remote)
        if known is None or known[0] != credential:
            known = (credential, self._open(remote, credential))
            self._remember(remote, known)
        late_s = self._clock() - known[1].expires_s
        if late_s > CLOCK_SLACK_S:
            raise AdmissionRefused(
                f"expected a current admission, got one that expired {late_s:.0f} s ago; "
                "the peer renews it at the coordinator"
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

    def _remember(self, remote: str, known: tuple[bytes, Admission]) -> None:
        if len(self._known) >= 4096:
            self._known.pop(next(iter(self._known)))
        self._known[remote] = known
