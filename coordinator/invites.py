"""Invites and evictions: who may join a run, as what, and who may not come back.

The organiser's commands write one file, the coordinator another, so that neither waits for the
other. Both lie next to the run's keys: access to that directory is the organiser's right. They are
replaced whole, synced, with mode 0600; the coordinator looks for a new version at every join and
twice a second.

    invites.json    {"version": 1,
                     "invites": [{"id", "kind": "trainer" | "keeper" | "watcher", "token_sha256",
                                  "uses", "expires_s", "revoked"}],
                     "evicted": [{"peer_id", "at_s", "reason"}]}
    uses.json       {invite id: [PeerID, ...]}, the peers that joined with an invite that has
                    limits, or is for keepers

Tokens are kept as SHA-256: a copy of these files admits no peer. A use is a PeerID, not a join: a
peer that restarts takes no second one, and may come back after the invite has expired. The invite
that `atoll coordinator` prints has the id `first`: it is for trainers, without a limit, until it is
revoked. A PeerID that has joined with an invite for keepers is a keeper for good, whatever it asks
for later; only an eviction ends that.

Exceptions:

    ValueError
      InvitesError      a file is damaged, or names an invite or a peer that is not there
    Exception
      InviteRefused     the token does not allow what is asked; the text is for the other side
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

INVITES_FILE = "invites.json"
USES_FILE = "uses.json"
BASE_FILE = "invite"  # the first invite as the running coordinator gave it: addresses and pins
FIRST = "first"
MAX_USES = 100_000  # no run has so many peers: beyond is a typo
MAX_EVICTED = 1024  # newest ones that peers learn of, 53 bytes each; a heartbeat carries changes
_LOCK_FILE = ".invites.lock"
_TOKEN_BYTES = 16  # 128 bits, which nobody guesses

Kind = Literal["trainer", "keeper", "watcher"]
T = TypeVar("T")

_CONFIG = ConfigDict(strict=True, extra="forbid")


class InvitesError(ValueError):
    """A file of invites is damaged, or lacks what was named."""


class InviteRefused(Exception):
    """The token does not allow what is asked."""


@dataclass(frozen=True, kw_only=True)
class IssuedInvite:
    """An invite as it is kept: without its token."""

    __pydantic_config__ = _CONFIG

    id: str
    kind: Kind
    token_sha256: str
    uses: Annotated[int, Field(ge=0, le=MAX_USES)] = 0
    """Peers that may join with it; 0: any number."""
    expires_s: Annotated[float, Field(ge=0)] = 0
    """Seconds since 1970; 0: never."""
    revoked: bool = False


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """A peer that the organiser put out."""

    __pydantic_config__ = _CONFIG

    peer_id: Annotated[str, Field(min_length=1, max_length=128)]
    at_s: float
    reason: Annotated[str, Field(max_length=200)] = ""


@dataclass(frozen=True, kw_only=True)
class InviteBook:
    """Everything that the organiser decided."""

    __pydantic_config__ = _CONFIG

    version: Literal[1] = 1
    invites: list[IssuedInvite] = field(default_factory=list)
    evicted: list[Eviction] = field(default_factory=list)


_BOOK = TypeAdapter(InviteBook)
_USES = TypeAdapter(dict[str, list[str]])


class InviteDesk:
    """Checks tokens for the coordinator, and counts the uses of invites."""

    def __init__(self, folder: Path, first_token: bytes) -> None:
        """Read both files. Raises InvitesError."""
        self._folder = folder
        self._first_token = first_token
        self._seen: tuple[int, int, int] | None = None
        self._uses = read_uses(folder)
        self._by_hash: dict[str, IssuedInvite] = {}
        self._evicted: dict[str, Eviction] = {}
        self.refresh()

    def refresh(self) -> list[Eviction]:
        """Read what the organiser changed; return the evictions that are new."""
        try:
            stat = (self._folder / INVITES_FILE).stat()
            seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        except FileNotFoundError:
            seen = (0, 0, 0)
        if seen == self._seen:
            return []
        book = read_book(self._folder)
        self._seen = seen
        invites = {invite.token_sha256: invite for invite in book.invites}
        first = IssuedInvite(id=FIRST, kind="trainer", token_sha256=token_hash(self._first_token))
        self._by_hash = {first.token_sha256: first} | invites
        before, self._evicted = self._evicted, {e.peer_id: e for e in book.evicted}
        return [e for e in book.evicted if e.peer_id not in before]

    def evict(self, peer_id: str, *, at_s: float, reason: str) -> bool:
        """Put a peer out as the organiser would; False if it is out already."""
        return peer_id not in self._evicted and evict(
            self._folder, peer_id, at_s=at_s, reason=reason
        )

    def readmit(self, peer_id: str) -> None:
        """Let a peer come back."""
        if peer_id in self._evicted:
            readmit(self._folder, peer_id)
            self.refresh()

    def reason_out(self, peer_id: str) -> str | None:
        """Return why the organiser put a peer out, perhaps without a word; None if it is in."""
        eviction = self._evicted.get(peer_id)
        return eviction.reason if eviction is not None else None

    def join(self, token: bytes, peer_id: str, now_s: float) -> None:
        """Take a use of the token's invite for a peer. Raises InviteRefused."""
        self.refresh()
        invite = self._find(token)
        if invite.kind == "watcher":
            raise InviteRefused(
                "the invite is for watching only; ask the organiser for one for trainers"
            )
        used = self._uses.get(invite.id, [])
        if peer_id in used:
            return
        self._expect_current(invite, now_s)
        if invite.uses and len(used) >= invite.uses:
            raise InviteRefused(
                f"the invite was for {invite.uses} peer{'s' * (invite.uses != 1)}, and all have "
                "joined; ask the organiser for another"
            )
        if invite.uses or invite.expires_s or invite.kind == "keeper":
            self._uses[invite.id] = [*used, peer_id][-MAX_USES:]
            _replace(self._folder / USES_FILE, _USES.dump_json(self._uses))

    def is_for_keepers(self, token: bytes) -> bool:
        """Return whether the token is that of an invite for keepers, current or not."""
        self.refresh()
        invite = self._by_hash.get(token_hash(token))
        return invite is not None and invite.kind == "keeper"

    def is_keeper(self, peer_id: str) -> bool:
        """Return whether a peer has joined with an invite for keepers."""
        keepers = (i.id for i in self._by_hash.values() if i.kind == "keeper")
        return any(peer_id in self._uses.get(invite_id, ()) for invite_id in keepers)

    def watch(self, token: bytes, now_s: float) -> None:
        """Accept the token of any current invite. Raises InviteRefused."""
        self._expect_current(self._find(token), now_s)

    def evicted(self, since_s: float) -> list[str]:
        """Return the PeerIDs evicted since a time, at most `MAX_EVICTED` of the newest, sorted."""
        recent = [e for e in self._evicted.values() if e.at_s >= since_s]
        newest = sorted(recent, key=lambda e: e.at_s)[-MAX_EVICTED:]
        return sorted(e.peer_id for e in newest)

    def _find(self, token: bytes) -> IssuedInvite:
        digest = token_hash(token)
        invite = self._by_hash.get(digest)
        if invite is None or not hmac.compare_digest(invite.token_sha256, digest):
            raise InviteRefused(
                "expected the token of this run's invite; ask the organiser for an invite"
            )
        if invite.revoked:
            raise InviteRefused("the organiser has revoked this invite; ask for another")
        return invite

    def _expect_current(self, invite: IssuedInvite, now_s: float) -> None:
        if invite.expires_s and now_s > invite.expires_s:
            raise InviteRefused("the invite has expired; ask the organiser for another")


# The organiser's side


def issue(folder: Path, *, kind: Kind, uses: int = 0, expires_s: float = 0) -> tuple[str, bytes]:
    """Add an invite; return its id and its token, which is kept nowhere."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    invite = IssuedInvite(
        id=secrets.token_hex(4),
        kind=kind,
        token_sha256=token_hash(token),
        uses=uses,
        expires_s=expires_s,
    )
    with _changing(folder) as book:
        book.invites.append(invite)
    return invite.id, token


def revoke(folder: Path, invite_id: str, first_token: bytes) -> None:
    """Make an invite unusable. Raises InvitesError if there is none of this id."""
    with _changing(folder) as book:
        if invite_id == FIRST and not any(i.id == FIRST for i in book.invites):
            digest = token_hash(first_token)
            book.invites.append(IssuedInvite(id=FIRST, kind="trainer", token_sha256=digest))
        found = [i for i in book.invites if i.id == invite_id]
        if not found:
            ids = ", ".join([FIRST, *(i.id for i in book.invites if i.id != FIRST)])
            raise InvitesError(f"expected the id of an invite ({ids}), got {invite_id!r}")
        for index, invite in enumerate(book.invites):
            if invite.id == invite_id:
                revoked = _BOOK.dump_python(InviteBook(invites=[invite]))["invites"][0]
                book.invites[index] = IssuedInvite(**(revoked | {"revoked": True}))


def evict(folder: Path, peer_id: str, *, at_s: float, reason: str = "") -> bool:
    """Put a peer out; return False if it is out already."""
    with _changing(folder) as book:
        if any(e.peer_id == peer_id for e in book.evicted):
            return False
        book.evicted.append(Eviction(peer_id=peer_id, at_s=at_s, reason=reason[:200]))
        return True


def readmit(folder: Path, peer_id: str) -> None:
    """Let a peer come back that was put out."""
    with _changing(folder) as book:
        book.evicted[:] = [each for each in book.evicted if each.peer_id != peer_id]


def read_book(folder: Path) -> InviteBook:
    """Return what the organiser decided; empty before the first decision. Raises InvitesError."""
    return _read(folder / INVITES_FILE, _BOOK, InviteBook)


def read_uses(folder: Path) -> dict[str, list[str]]:
    """Return the peers that joined with each invite that has a limit. Raises InvitesError."""
    return _read(folder / USES_FILE, _USES, dict)


@contextlib.contextmanager
def _changing(folder: Path) -> Iterator[InviteBook]:
    """Let one command at a time change the book; write it unless the block fails."""
    descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        book = read_book(folder)
        yield book
        _replace(folder / INVITES_FILE, _BOOK.dump_json(_BOOK.validate_python(book), indent=1))
    finally:
        os.close(descriptor)


def _read(path: Path, adapter: TypeAdapter[T], empty: Callable[[], T]) -> T:
    try:
        return adapter.validate_json(path.read_bytes())
    except FileNotFoundError:
        return empty()
    except ValidationError:
        raise InvitesError(
            f"{path}: damaged; restore a copy, or delete it, evict the peers and invite them again"
        ) from None


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def token_hash(token: bytes) -> str:
    """Return what is kept of a token: the SHA-256, in hex."""
    return hashlib.sha256(b"atoll invite 1" + token).hexdigest()
