"""Relocations: where the coordinator of a run is, signed by the run's key.

    record    = payload | signature
    payload   = msgpack list [1, run_id, serial, [address, ...], [multiaddr, ...]]
                serial       1 to 2^53; of two records, the one with the higher serial counts
                addresses    "host:port" of the coordinator, 1 to 16
                bootstrap    multiaddrs with PeerIDs of the run's first DHT node, 0 to 16
    signature = 64 bytes, Ed25519 of the run's key over "atoll relocation 1" | payload

An invite names addresses once and for all. A record replaces them for whoever has it, and for
nothing else: the run, its key and the certificate stay those of the invite. It is not an entry of
the log, since no update depends on it, and since it has to reach peers that hold no log yet. Anyone
may pass it on.

The serial (`serial_at`) counts restores from copies first, and then the time at which the
coordinator signed it, in seconds since 1970; it is above that of the record before. So it grows
also when a coordinator starts from a copy and does not know the last one, and whoever was replaced
by a restore signs below whoever replaced it, however late, and in the same second.

Exceptions:

    ValueError
      RelocationInvalid    the record is malformed, of another run, or not signed by the run's key
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Self

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from atoll.coordinator.run.addresses import split_address
from atoll.coordinator.run.invite import Address, Invite, Multiaddr

MAX_RECORD_BYTES = 10_240  # 16 addresses and 16 multiaddrs of the greatest length fit
MAX_SERIAL = 1 << 53
_SIGNATURE_BYTES = 64
_VERSION = 1
_DOMAIN = b"atoll relocation 1"
_SECONDS_BITS = 32  # until 2106; a restore's number has six digits, 20 bits


def serial_at(now_s: float, *, restores: int) -> int:
    """Return the least serial of a record.

    Args:
        now_s: seconds since 1970.
        restores: the number of the restore from copies that made the coordinator; 0 without one.
    """
    seconds = min(max(int(now_s), 1), (1 << _SECONDS_BITS) - 1)
    return restores << _SECONDS_BITS | seconds


class RelocationInvalid(ValueError):
    """The record says nothing about where this run's coordinator is."""


@dataclass(frozen=True, kw_only=True)
class Relocation:
    """The addresses of the coordinator since one of its starts."""

    __pydantic_config__ = ConfigDict(strict=True, revalidate_instances="always")

    serial: Annotated[int, Field(ge=1, le=MAX_SERIAL)]
    addresses: Annotated[tuple[Address, ...], Field(min_length=1, max_length=16)]
    """'host:port', tried in this order."""
    bootstrap: Annotated[tuple[Multiaddr, ...], Field(max_length=16)] = ()
    """Multiaddrs of the run's first DHT node."""

    def sign(self, run_id: bytes, sign: Callable[[bytes], bytes]) -> bytes:
        """Return the record; `sign` signs with the run's key."""
        listed = [list(self.addresses), list(self.bootstrap)]
        payload: Any = msgpack.packb([_VERSION, run_id, self.serial, *listed])
        return bytes(payload) + sign(_DOMAIN + bytes(payload))

    @classmethod
    def open(cls, record: bytes, run_key: bytes, run_id: bytes) -> Self:
        """Check and decode a record. Raises RelocationInvalid."""
        if not _SIGNATURE_BYTES < len(record) <= MAX_RECORD_BYTES:
            raise RelocationInvalid(
                f"expected a relocation of at most {MAX_RECORD_BYTES} bytes, got {len(record)}"
            )
        payload, signature = record[:-_SIGNATURE_BYTES], record[-_SIGNATURE_BYTES:]
        try:
            Ed25519PublicKey.from_public_bytes(run_key).verify(signature, _DOMAIN + payload)
        except (InvalidSignature, ValueError):
            raise RelocationInvalid("expected a relocation signed by this run's key") from None
        try:
            version, signed_run, serial, addresses, bootstrap = msgpack.unpackb(
                payload, raw=False, use_list=False
            )
        except Exception:  # msgpack raises several kinds
            raise RelocationInvalid("expected the fields of a relocation") from None
        if (version, signed_run) != (_VERSION, run_id):
            raise RelocationInvalid(f"expected a relocation of version {_VERSION} of this run")
        relocation = cls(serial=serial, addresses=addresses, bootstrap=bootstrap)
        _expect_usable(relocation)
        return relocation


_VALIDATOR = TypeAdapter(Relocation)


def _expect_usable(relocation: Relocation) -> None:
    """Raise RelocationInvalid unless numbers and forms of all addresses are within bounds."""
    try:
        _VALIDATOR.validate_python(relocation)
        for address in relocation.addresses:
            split_address(address)
    except ValidationError:
        raise RelocationInvalid("a relocation has fields of a wrong type or range") from None
    except ValueError as error:
        raise RelocationInvalid(f"a relocation names no address: {error}") from None
    if not all("/p2p/" in address for address in relocation.bootstrap):
        raise RelocationInvalid("a relocation names a DHT node without its PeerID")


class Whereabouts:
    """The addresses of a run's coordinator that a peer knows: the invite's, or a newer record's.

    A record is taken if its serial is above that of the one before, so no order in which old ones
    are shown again leads anywhere twice.
    """

    def __init__(self, invite: Invite) -> None:
        """Begin with the invite's addresses."""
        self._invite = invite
        self.record = b""
        """The newest relocation; empty without one."""
        self.relocation: Relocation | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """'host:port' of the coordinator, in the order in which to try them, at most 32.

        The invite may be newer than the record, as an organiser issues another one for a peer that
        was away; its addresses are tried last.
        """
        newest = self.relocation.addresses if self.relocation is not None else ()
        return tuple(dict.fromkeys([*newest, *self._invite.addresses]))

    def take(self, record: bytes) -> bool:
        """Take a record if it is newer; return whether it is.

        Raises:
            RelocationInvalid: it is none of this run.
        """
        if record == self.record:
            return False
        found = Relocation.open(record, self._invite.run_key, self._invite.run_id)
        if self.relocation is not None and found.serial <= self.relocation.serial:
            return False
        self.record, self.relocation = record, found
        return True
