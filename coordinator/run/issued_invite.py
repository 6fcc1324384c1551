"""An invite as the organiser keeps it: what it is for, and its limits, without its token."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

MAX_INVITES = 4096  # of a run, 300 bytes each
MAX_USES = 100_000  # no run has so many peers: beyond is a typo
_TOKEN_BYTES = 16  # 128 bits, which nobody guesses

Kind = Literal["trainer", "keeper", "follower", "observer"]


@dataclass(frozen=True, kw_only=True)
class IssuedInvite:
    """An invite as it is kept: without its token."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    id: Annotated[str, Field(pattern=r"^[0-9a-z]{1,16}$")]
    kind: Kind
    token_sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
    uses: Annotated[int, Field(ge=0, le=MAX_USES)] = 0
    """Peers that may join with it, or observers that may look; 0: any number."""
    expires_s: Annotated[float, Field(ge=0, le=2**40, allow_inf_nan=False)] = 0
    """Seconds since 1970; 0: never."""
    revoked: bool = False
    revoked_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0
    """Seconds since 1970."""

    @property
    def is_counted(self) -> bool:
        """Return whether each of its users is kept."""
        return bool(self.uses or self.expires_s) or self.kind == "keeper"


def new_invite(*, kind: Kind, uses: int = 0, expires_s: float = 0) -> tuple[IssuedInvite, bytes]:
    """Return an invite to be kept, and its token, which is kept nowhere."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    invite = IssuedInvite(
        id=secrets.token_hex(4),
        kind=kind,
        token_sha256=token_hash(token),
        uses=uses,
        expires_s=expires_s,
    )
    return invite, token


def token_hash(token: bytes) -> str:
    """Return what is kept of a token: the SHA-256, in hex."""
    return hashlib.sha256(b"atoll invite 1" + token).hexdigest()
