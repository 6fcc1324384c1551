"""The invite: one string that holds everything a peer needs to join a run.

    "atoll1" + base64url without padding (payload | checksum)

    payload   msgpack list [addresses, run_id, run_key, tls_sha256, bootstrap, token]
              addresses    list of "host:port" of the coordinator, 1 to 16
              run_id       32 bytes
              run_key      32 bytes, the run's Ed25519 public key
              tls_sha256   32 bytes, SHA-256 of the coordinator's certificate (DER)
              bootstrap    list of multiaddrs of the run's first DHT nodes, 0 to 16
              token        0 to 64 bytes; presented to the coordinator when joining
    checksum  first 6 bytes of SHA-256("atoll1" | payload): detects copying mistakes

The digit after "atoll" is the version of the format. White space is ignored, and so are quotes
around it: an invite wrapped by a mail program still works. The token of an invite-only run decides
what its holder may do: join, for a number of peers and a time, or only watch
(`atoll.coordinator.invites`).

Exceptions:

    ValueError
      InviteError
        NotAnInvite      the text does not start like an invite
        InviteVersion    an invite of another format version
        DamagedInvite    characters are missing or changed
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from typing import Annotated, Any, Self

import msgpack
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

VERSION = 1  # raised with a change of the fields: an older peer then names it
MAX_BOOTSTRAP = 16
MAX_CHARS = 8192  # 16 addresses and 16 multiaddrs of 200 characters fit
_PREFIX = f"atoll{VERSION}"
_CHECKSUM_BYTES = 6  # a damaged invite passes once in 2^48
# What messages and shells put around it.
_QUOTES = "\"'`<>\u2018\u2019\u201c\u201d\u00ab\u00bb"

_Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
Address = Annotated[str, Field(min_length=3, max_length=260, pattern=r"^\S+:\d{1,5}$")]
Multiaddr = Annotated[str, Field(min_length=1, max_length=300, pattern=r"^/\S+$")]


class InviteError(ValueError):
    """The text is not a usable invite."""


class NotAnInvite(InviteError):
    """The text does not start like an invite."""


class InviteVersion(InviteError):
    """The invite has another format version."""


class DamagedInvite(InviteError):
    """Characters of the invite are missing or changed."""


@dataclass(frozen=True, kw_only=True)
class Invite:
    """The decoded fields of an invite."""

    __pydantic_config__ = ConfigDict(strict=True, revalidate_instances="always")

    addresses: Annotated[tuple[Address, ...], Field(min_length=1, max_length=16)]
    """The coordinator's addresses, 'host:port', tried in this order."""
    run_id: _Digest
    run_key: _Digest
    """The run's Ed25519 public key."""
    tls_sha256: _Digest
    """SHA-256 of the coordinator's certificate."""
    bootstrap: Annotated[tuple[Multiaddr, ...], Field(max_length=MAX_BOOTSTRAP)] = ()
    """Multiaddrs of DHT nodes through which a peer can join while the coordinator is away."""
    token: Annotated[bytes, Field(max_length=64)] = b""

    def encode(self) -> str:
        """Return the invite as text. Raises InviteError when a field is out of range."""
        _check(self)
        fields = [list(self.addresses), self.run_id, self.run_key, self.tls_sha256]
        packed: Any = msgpack.packb([*fields, list(self.bootstrap), self.token])
        payload = bytes(packed)
        text = base64.urlsafe_b64encode(payload + _checksum(payload)).decode().rstrip("=")
        return _PREFIX + text

    @classmethod
    def decode(cls, text: str) -> Self:
        """Decode an invite. Raises NotAnInvite, InviteVersion or DamagedInvite."""
        text = _compact(text)
        payload = _payload(text.removeprefix(_PREFIX))
        try:
            fields = msgpack.unpackb(payload, raw=False, use_list=False)
            addresses, run_id, run_key, tls_sha256, bootstrap, token = fields
        except Exception:  # of several kinds; the checksum holds, so the writer erred
            raise DamagedInvite(_damaged("its fields cannot be read")) from None
        invite = cls(
            addresses=addresses,
            run_id=run_id,
            run_key=run_key,
            tls_sha256=tls_sha256,
            bootstrap=bootstrap,
            token=token,
        )
        _check(invite)
        return invite

    def __str__(self) -> str:
        return self.encode()


_VALIDATOR = TypeAdapter(Invite)


def _check(invite: Invite) -> None:
    try:
        _VALIDATOR.validate_python(invite)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DamagedInvite(_damaged(f"{where}: {first['msg']}")) from None


def _compact(text: str) -> str:
    if len(text) > 2 * MAX_CHARS:
        raise NotAnInvite(f"expected an invite of at most {MAX_CHARS} characters, got {len(text)}")
    text = "".join(text.split()).strip(_QUOTES)
    found = re.match(r"atoll(\d+)", text)
    if not found:
        shown = repr(text[:24]) if text else "nothing"
        raise NotAnInvite(
            f"expected an invite, which starts with '{_PREFIX}', got {shown}; "
            "`atoll coordinator` prints it"
        )
    if not text.startswith(_PREFIX) or found[1][0] != str(VERSION):
        raise InviteVersion(
            f"expected an invite of version {VERSION}, got one of version {found[1][:3]}; "
            "use the version of Atoll that created it"
        )
    return text


def _payload(encoded: str) -> bytes:
    try:
        raw = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        raise DamagedInvite(_damaged("it contains characters that no invite has")) from None
    payload, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    if _checksum(payload) != checksum:
        raise DamagedInvite(_damaged("its checksum does not match"))
    return payload


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(_PREFIX.encode() + payload).digest()[:_CHECKSUM_BYTES]


def _damaged(reason: str) -> str:
    return f"damaged invite: {reason}; copy the whole string again"
