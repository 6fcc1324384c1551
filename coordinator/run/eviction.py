"""Evictions: the run's signed list of peers and invites that the organiser put out.

    record    = payload | signature
    payload   = msgpack list [2, run_id, issued_s, [PeerID, ...], [invite id, ...]], both sorted
    signature = 64 bytes, Ed25519 of the run's key over "atoll evicted 2" | payload

An admission lasts for days and has no other end. The coordinator sends the list with the answer to
the first heartbeat after a change; peers refuse the admissions of those peers, and those given for
those invites, from then on. A peer or an invite leaves the list once its last admission has
expired: the coordinator gives no other.

Exceptions:

    ValueError
      EvictionsInvalid    the record is malformed, of another run, or not signed by the run's key
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

MAX_RECORD_BYTES = 256 << 10  # 1,024 PeerIDs are about 56 kB
_SIGNATURE_BYTES = 64
_DOMAIN = b"atoll evicted 2"


class EvictionsInvalid(ValueError):
    """The record is not a list of this run."""


@dataclass(frozen=True, kw_only=True)
class Evictions:
    """The peers that are out, and the invites that are revoked."""

    issued_s: int
    peer_ids: frozenset[str]
    invites: frozenset[str] = frozenset()

    @classmethod
    def open(cls, record: bytes, run_key: bytes, run_id: bytes) -> Self:
        """Check and decode a record. Raises EvictionsInvalid."""
        if not _SIGNATURE_BYTES < len(record) <= MAX_RECORD_BYTES:
            raise EvictionsInvalid(f"expected at most {MAX_RECORD_BYTES} bytes, got {len(record)}")
        payload, signature = record[:-_SIGNATURE_BYTES], record[-_SIGNATURE_BYTES:]
        try:
            Ed25519PublicKey.from_public_bytes(run_key).verify(signature, _DOMAIN + payload)
            version, signed_run, issued_s, *listed = msgpack.unpackb(payload, raw=False)
            peer_ids, invites = (frozenset(map(str, each)) for each in listed)
        except (InvalidSignature, ValueError, TypeError, msgpack.UnpackException):
            raise EvictionsInvalid("expected evictions signed by this run's key") from None
        if (version, signed_run) != (2, run_id):
            raise EvictionsInvalid("expected evictions of this run")
        return cls(issued_s=int(issued_s), peer_ids=peer_ids, invites=invites)


def sign_evictions(
    peer_ids: Sequence[str],
    invites: Sequence[str] = (),
    *,
    run_id: bytes,
    issued_s: int,
    key: Ed25519PrivateKey,
) -> bytes:
    """Return the signed record."""
    payload: Any = msgpack.packb([2, run_id, issued_s, sorted(peer_ids), sorted(invites)])
    return bytes(payload) + key.sign(_DOMAIN + bytes(payload))
