"""What the organiser asks of a coordinator about invites: issue one, revoke one, or list all.

    request      JSON {"run_id", "nonce", "issue", "revoke"}; run_id and nonce in hex
    signature    64 bytes, Ed25519 of the organiser's key over "atoll invites 1" | request
    reply        JSON list of {"id", "kind", "uses", "expires_s", "revoked", "joined"}

The nonce is one of the coordinator's, for `ORGANISER`, so a copy of a request serves nobody later.
The organiser makes the token: the coordinator gets its SHA-256 alone, and a request that is sent
again, as its answer was lost, issues nothing twice.

Exceptions:

    ValueError
      InviteRequestInvalid    the request is malformed, of another run, or of another key
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from atoll.coordinator.run.issued_invite import MAX_INVITES, MAX_USES, IssuedInvite, Kind

ORGANISER = "organiser"
"""Whom the nonce is for: no PeerID."""
MAX_REQUEST_BYTES = 4096  # about 400 are used
_DOMAIN = b"atoll invites 1"
_CONFIG = ConfigDict(strict=True, extra="forbid")


class InviteRequestInvalid(ValueError):
    """The request is none of the organiser's."""


@dataclass(frozen=True, kw_only=True)
class InviteRequest:
    """A request; with neither `issue` nor `revoke` it only lists."""

    __pydantic_config__ = _CONFIG

    run_id: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    issue: IssuedInvite | None = None
    revoke: Annotated[str, Field(max_length=16)] = ""
    """Id of an invite; empty for none."""

    def sign(self, sign: Callable[[bytes], bytes]) -> tuple[bytes, bytes]:
        """Return the request's bytes, and the signature of the organiser's key."""
        data = _REQUEST.dump_json(self)
        return data, sign(_DOMAIN + data)

    @classmethod
    def open(
        cls, data: bytes, signature: bytes, verify: Callable[[bytes, bytes], bool]
    ) -> InviteRequest:
        """Check `verify(signed data, signature)` of the organiser's key, and decode a request.

        Raises:
            InviteRequestInvalid: it does not hold, or the bytes are no request.
        """
        if len(data) > MAX_REQUEST_BYTES or not verify(_DOMAIN + data, signature):
            raise InviteRequestInvalid(
                "expected a request signed with the organiser's key, got another; pass --key with "
                "the one that is in force"
            )
        try:
            return _REQUEST.validate_json(data)
        except ValidationError:
            raise InviteRequestInvalid(
                "expected a request about invites; use the organiser's version of Atoll"
            ) from None


@dataclass(frozen=True, kw_only=True)
class ListedInvite:
    """An invite as the organiser sees it."""

    __pydantic_config__ = _CONFIG

    id: str
    kind: Kind
    uses: Annotated[int, Field(ge=0, le=MAX_USES)]
    """0: any number"""
    expires_s: float
    """0: never"""
    revoked: bool
    joined: int
    """Peers that have joined with it, or observers that have looked, if they are counted."""

    @classmethod
    def of(cls, invite: IssuedInvite, joined: int) -> ListedInvite:
        """Return how an invite is listed."""
        return cls(
            id=invite.id,
            kind=invite.kind,
            uses=invite.uses,
            expires_s=invite.expires_s,
            revoked=invite.revoked,
            joined=joined,
        )


def pack_list(invites: Sequence[ListedInvite]) -> bytes:
    """Return a list of invites as JSON."""
    return _LIST.dump_json(list(invites))


def read_list(data: bytes) -> list[ListedInvite]:
    """Return the list in a reply. Raises InviteRequestInvalid."""
    try:
        return _LIST.validate_json(data)
    except ValidationError:
        raise InviteRequestInvalid("expected a list of invites") from None


_REQUEST = TypeAdapter(InviteRequest)
_LIST = TypeAdapter(Annotated[list[ListedInvite], Field(max_length=MAX_INVITES + 1)])
