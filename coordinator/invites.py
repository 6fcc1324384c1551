"""Invites and evictions: who may join a run, as what, and who may not come back.

The organiser's commands write one file, on the coordinator's machine or through the coordinator
(`atoll.coordinator.run.invite_request`), and the coordinator another, so that neither waits for the
other. Both lie next to the run's keys: access to that directory is the organiser's right. They are
replaced whole, synced, with mode 0600; the coordinator looks for a new version at every join and
twice a second.

    invites.json    {"version": 1,
                     "invites": [{"id", "kind": "trainer" | "keeper" | "follower" | "observer",
                                  "token_sha256", "uses", "expires_s", "revoked", "revoked_s"}],
                     "evicted": [{"peer_id", "at_s", "reason"}]}
    uses.json       {invite id: [PeerID, ...]}, the peers that joined with an invite that has
                    limits, or is for keepers; of an invite for observers, what names them

Tokens are kept as SHA-256: a copy of these files admits no peer. A use is a PeerID, not a join: a
peer that restarts takes no second one, and may come back after the invite has expired. An observer
has no PeerID: it is named by a secret of its own, of which the file keeps a digest. A use is on the
disk before its answer leaves. The invite that `atoll coordinator` prints has the id `first`: it is
for trainers, without a limit, until it is revoked. A PeerID that has joined with an invite for
keepers is a keeper for good, whatever it asks for later; only an eviction ends that.

A revoked invite is good for nothing: not for those that joined with it either, whose sessions end
with it (`atoll.coordinator.admission_control`).

Exceptions:

    ValueError
      InvitesError      a file is damaged, or names an invite or a peer that is not there
    Exception
      InviteRefused     the token does not allow what is asked; the text is for the other side
        InviteRevoked   it never will
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from atoll.coordinator.run.files import replace_private
from atoll.coordinator.run.issued_invite import (
    MAX_INVITES,
    MAX_USES,
    IssuedInvite,
    Kind,
    new_invite,
    token_hash,
)

INVITES_FILE = "invites.json"
USES_FILE = "uses.json"
BASE_FILE = "invite"  # the first invite as the running coordinator gave it: addresses and pins
FIRST = "first"
MAX_EVICTED = 1024  # newest ones that peers learn of, 53 bytes each; a heartbeat carries changes
_LOCK_FILE = ".invites.lock"
VIEWER_BYTES = 16  # an observer's secret

T = TypeVar("T")

_CONFIG = ConfigDict(strict=True, extra="forbid")


class InvitesError(ValueError):
    """A file of invites is damaged, or lacks what was named."""


class InviteRefused(Exception):
    """The token does not allow what is asked."""


class InviteRevoked(InviteRefused):
    """The organiser has revoked the invite."""

    def __init__(self) -> None:
        super().__init__("the organiser has revoked this invite; ask for another")


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
        self.folder = folder
        self._first_token = first_token
        self._seen: tuple[int, int, int] | None = None
        self._uses = read_uses(folder)
        self._by_hash: dict[str, IssuedInvite] = {}
        self._revoked: dict[str, float] = {}
        """By id of an invite: when it was revoked."""
        self._evicted: dict[str, Eviction] = {}
        self._new: tuple[list[Eviction], list[str]] = ([], [])
        self.refresh()
        self.news()

    def news(self) -> tuple[list[Eviction], list[str]]:
        """Return evictions, and ids of revoked invites, that were read since the last call."""
        new, self._new = self._new, ([], [])
        return new

    def refresh(self) -> None:
        """Read what the organiser changed."""
        try:
            stat = (self.folder / INVITES_FILE).stat()
            seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        except FileNotFoundError:
            seen = (0, 0, 0)
        if seen == self._seen:
            return
        book = read_book(self.folder)
        self._seen = seen
        invites = {invite.token_sha256: invite for invite in book.invites}
        first = IssuedInvite(id=FIRST, kind="trainer", token_sha256=token_hash(self._first_token))
        self._by_hash = {first.token_sha256: first} | invites
        before, self._revoked = (
            self._revoked,
            {each.id: each.revoked_s for each in book.invites if each.revoked},
        )
        self._new[1].extend(self._revoked.keys() - before.keys())
        in_before, self._evicted = self._evicted, {e.peer_id: e for e in book.evicted}
        self._new[0].extend(e for e in book.evicted if e.peer_id not in in_before)

    def evict(self, peer_id: str, *, at_s: float, reason: str) -> bool:
        """Put a peer out as the organiser would; False if it is out already."""
        return peer_id not in self._evicted and evict(
            self.folder, peer_id, at_s=at_s, reason=reason
        )

    def readmit(self, peer_id: str) -> None:
        """Let a peer come back."""
        if peer_id in self._evicted:
            readmit(self.folder, peer_id)
            self.refresh()

    def reason_out(self, peer_id: str) -> str | None:
        """Return why the organiser put a peer out, perhaps without a word; None if it is in."""
        eviction = self._evicted.get(peer_id)
        return eviction.reason if eviction is not None else None

    def join(self, token: bytes, peer_id: str, now_s: float) -> IssuedInvite:
        """Take a use of the token's invite for a peer, and return the invite.

        Raises:
            InviteRefused: it allows no such join.
            OSError: the use cannot be kept.
        """
        self.refresh()
        invite = self._find(token)
        if invite.kind == "observer":
            raise InviteRefused(
                "the invite is for watching only; ask the organiser for one for trainers"
            )
        if peer_id not in self._uses.get(invite.id, ()):  # who has joined may return
            self._expect_current(invite, now_s)
            self._use(invite, peer_id, "peer", "have joined")
        return invite

    def _use(self, invite: IssuedInvite, user: str, who: str, did: str) -> None:
        """Note a new user of an invite that counts them, on the disk first."""
        if not invite.is_counted:
            return
        used = self._uses.get(invite.id, [])
        if invite.uses and len(used) >= invite.uses:
            raise InviteRefused(
                f"the invite was for {invite.uses} {who}{'s' * (invite.uses != 1)}, and all {did}; "
                "ask the organiser for another"
            )
        uses = self._uses | {invite.id: [*used, user][-MAX_USES:]}
        replace_private(self.folder / USES_FILE, _USES.dump_json(uses))
        self._uses = uses

    def kind_of(self, token: bytes) -> Kind | None:
        """Return what a token's invite is for, current or not; None if there is none."""
        self.refresh()
        invite = self._by_hash.get(token_hash(token))
        return invite.kind if invite is not None else None

    def is_revoked(self, invite_id: str) -> bool:
        """Return whether the organiser has revoked an invite."""
        return invite_id in self._revoked

    def revoked(self, since_s: float) -> list[str]:
        """Return the ids of invites revoked since a time, the newest `MAX_EVICTED`, sorted."""
        recent = [each for each, at_s in self._revoked.items() if at_s >= since_s]
        return sorted(sorted(recent, key=lambda each: self._revoked[each])[-MAX_EVICTED:])

    def is_keeper(self, peer_id: str, *, by: str = "") -> bool:
        """Return whether a peer has joined with an invite for keepers, which `by` may name."""
        keepers = (i.id for i in self._by_hash.values() if i.kind == "keeper")
        return any(each == by or peer_id in self._uses.get(each, ()) for each in keepers)

    def watch(self, token: bytes, now_s: float, viewer: bytes = b"") -> None:
        """Accept the token of any current invite, of an observer as one use of it.

        `viewer` is the secret by which an observer is known again.

        Raises:
            InviteRefused: the token allows no look.
            OSError: the use cannot be kept.
        """
        invite = self._find(token)
        self._expect_current(invite, now_s)
        if invite.kind != "observer" or not invite.uses:
            return
        if len(viewer) != VIEWER_BYTES:
            raise InviteRefused(
                "the invite is for a number of observers; look with a version of Atoll that names "
                "them"
            )
        name = hashlib.sha256(b"atoll viewer 1" + viewer).hexdigest()
        if name not in self._uses.get(invite.id, ()):
            self._use(invite, name, "observer", "have looked")

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
            raise InviteRevoked
        return invite

    def _expect_current(self, invite: IssuedInvite, now_s: float) -> None:
        if invite.expires_s and now_s > invite.expires_s:
            raise InviteRefused("the invite has expired; ask the organiser for another")


# The organiser's side


def issue(folder: Path, *, kind: Kind, uses: int = 0, expires_s: float = 0) -> tuple[str, bytes]:
    """Add an invite; return its id and its token."""
    invite, token = new_invite(kind=kind, uses=uses, expires_s=expires_s)
    keep(folder, invite)
    return invite.id, token


def keep(folder: Path, invite: IssuedInvite) -> None:
    """Keep a new invite; once more changes nothing. Raises InvitesError."""
    with _changing(folder) as book:
        same = [each for each in book.invites if each.id == invite.id]
        if not same and len(book.invites) >= MAX_INVITES:
            raise InvitesError(f"the run has {MAX_INVITES} invites already; use some of them")
        if same and replace(same[0], revoked=False, revoked_s=0) != invite:
            raise InvitesError(f"another invite has the id {invite.id}; try again")
        if not same:
            book.invites.append(invite)


def revoke(folder: Path, invite_id: str, first_token: bytes, *, at_s: float) -> None:
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
            if invite.id == invite_id and not invite.revoked:
                book.invites[index] = replace(invite, revoked=True, revoked_s=at_s)


def listed(folder: Path) -> list[tuple[IssuedInvite, int]]:
    """Return all invites, the first one too, and how many have used each. Raises InvitesError."""
    invites, used = list(read_book(folder).invites), read_uses(folder)
    if not any(invite.id == FIRST for invite in invites):
        invites.insert(0, IssuedInvite(id=FIRST, kind="trainer", token_sha256=""))
    return [(invite, len(used.get(invite.id, []))) for invite in invites]


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
        replace_private(
            folder / INVITES_FILE, _BOOK.dump_json(_BOOK.validate_python(book), indent=1)
        )
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
