"""Succession of electors: who votes at the next position. Pure rules, stated in docs/protocol.md.

An elector stays for as long as it answers; a newcomer has to contribute for some entries first.
No word of a single peer changes that. The owner of a part decides which cells it includes, never
who votes, and the leader of a term may leave out only electors that do not answer: each voter asks
those itself before it votes (`peer/rounds/consensus/voter.py`).

If the organiser names keepers, only they vote, and no entry changes the electorate: the epoch
record names the keepers, and a keeper that comes later votes from the next epoch on.

An entry also hands on the norm of each fragment's contributions, by which the next ones are bounded
(`reduction/contribution.py`): a peer that begins at a snapshot, or at the base of an epoch, then
computes the same clip factors as one that holds the whole log.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from atoll.optim.log.entry import (
    MAX_ELECTORS,
    Elector,
    Entry,
    Epoch,
    LogError,
    MalformedRecord,
    Member,
    Newcomer,
    Part,
    is_quorum,
)
from atoll.optim.log.orders import read_settings
from atoll.optim.reduction.contribution import carried_norm

Electors = Literal["members", "keepers"]
"""The voters: members that have contributed for a while, or only the keepers of the epoch."""

# Contributions of a peer before its first vote, in as many entries. Keys are free, work is not:
# whoever wants votes has to send this many with each of its keys.
TRIAL_ENTRIES = 8
# New electors of one entry for each old one: those that vote now stay a majority of the next
# electorate, so that an influx of keys cannot outvote them at once.
NEW_PER_OLD = 0.5
# Fewer electors than these take one new elector an entry: half of three would be a third of the
# next electorate, which stops a run by leaving soon after.
FEW_ELECTORS = 8
# Entries for which a peer that is away is remembered: a restarted elector, of which a new
# incarnation comes back, need not be tried again.
REMEMBERED_ENTRIES = 64
MAX_NEWCOMERS = 64  # as many as there can be electors: 5 kB of an entry, before it is deflated


class BadElectorate(LogError):
    """An entry whose next electorate does not follow from the present one."""


@dataclass(frozen=True)
class Succession:
    """The electors of the next position, peers that may become electors later, and norms."""

    electorate: tuple[Elector, ...]
    newcomers: tuple[Newcomer, ...] = ()
    norms: tuple[float, ...] = ()
    """by fragment; those that no entry has moved yet may be missing at the end"""

    def norm(self, fragment: int) -> float:
        """Return the norm that bounds a fragment's next contributions; 0 if there is none."""
        return self.norms[fragment] if fragment < len(self.norms) else 0.0


def after(entry: Entry) -> Succession:
    """Return the succession that an entry of the same epoch leaves."""
    return Succession(entry.electorate, entry.newcomers, entry.norms)


def at_base(epoch: Epoch) -> Succession:
    """Return the succession at the base of an epoch."""
    return Succession(epoch.electorate, epoch.newcomers, epoch.norms)


def remembered(
    before: Succession, electorate: Sequence[Elector], position: int
) -> tuple[Newcomer, ...]:
    """Return the newcomers of an epoch that opens at a position with an electorate.

    Electors that are away then have been tried: they vote again after their next contribution.
    Without them, an epoch of one elector would depend on that peer for `TRIAL_ENTRIES` entries.
    """
    return tuple(_remembered(before, electorate, position, ())[:MAX_NEWCOMERS])


def succeed(
    now: Succession,
    *,
    position: int,
    fragment: int,
    members: Sequence[Member],
    parts: Sequence[Part],
    dropped: Collection[str] = (),
    evicted: Collection[str] = (),
    electors: Electors = "members",
) -> Succession:
    """Return the electors, newcomers and norms after an entry.

    Args:
        now: of the entry's own position.
        position: the entry's.
        fragment: the entry's.
        members: the entry's; none in a NULL, after which everything stays as it is.
        parts: the entry's.
        dropped: PeerIDs of electors that do not answer. If the others would be no quorum of the
            present electorate, no elector is dropped.
        evicted: PeerIDs that orders up to the entry have put out.
        electors: who votes in this run; of keepers an entry neither adds nor drops any.
    """
    now = without_evicted(now, evicted)
    if not members:
        return now
    now = replace(now, norms=_norms_after(now, fragment, members))
    if electors == "keepers":
        return now
    workers = {m.peer_id: m.elector for i, m in enumerate(members) if _contributed(i, m, parts)}
    stay = [e for e in now.electorate if e.peer_id not in dropped]
    staying = [i for i, elector in enumerate(now.electorate) if elector in stay]
    if not is_quorum(staying, len(now.electorate)):
        stay = list(now.electorate)
    # A restarted elector votes on under its new incarnation: its key is what is trusted.
    kept = [workers.get(e.peer_id, e) for e in stay]
    known = _remembered(now, kept, position, workers)
    # A member that fell silent after it contributed is dropped, and not back with the same entry.
    before = {e.peer_id for e in now.electorate}
    joined = _promoted([n for n in known if n.peer_id not in before], workers, len(kept))
    electorate = (*kept, *(workers[n.peer_id] for n in joined))
    waiting = [n for n in known if n not in joined]
    return replace(now, electorate=electorate, newcomers=tuple(waiting[:MAX_NEWCOMERS]))


def without_evicted(now: Succession, evicted: Collection[str]) -> Succession:
    """Return a succession without peers that were put out.

    If all electors were, they stay until an epoch names others: an electorate cannot be empty.
    """
    left = tuple(e for e in now.electorate if e.peer_id not in evicted)
    waiting = tuple(n for n in now.newcomers if n.peer_id not in evicted)
    return replace(now, electorate=left or now.electorate, newcomers=waiting)


def check_succession(
    entry: Entry, now: Succession, electors: Electors = "members"
) -> list[Elector]:
    """Check an entry's electors and norms; return the present electors that it drops.

    Those that orders up to the entry have put out are none of them, whether they answer or not.

    Raises:
        BadElectorate: the entry breaks a rule, whoever answers and whoever does not.
        MalformedRecord: its norms do not follow from those before it and its members'.
    """
    named = {e.peer_id for e in entry.electorate}
    evicted = read_settings(entry.settings).evicted
    now = without_evicted(now, evicted)
    dropped = [e for e in now.electorate if e.peer_id not in named]
    due = succeed(
        now,
        position=entry.position,
        fragment=entry.fragment,
        members=entry.members,
        parts=entry.parts,
        dropped={e.peer_id for e in dropped},
        evicted=evicted,
        electors=electors,
    )
    if (entry.electorate, entry.newcomers) != (due.electorate, due.newcomers):
        raise BadElectorate(
            f"entry {entry.position}: expected {len(due.electorate)} acceptors and "
            f"{len(due.newcomers)} newcomers that follow from the present ones; got "
            f"{len(entry.electorate)} and {len(entry.newcomers)}"
        )
    if entry.norms != due.norms:
        raise MalformedRecord(f"entry {entry.position}: expected the norms that follow")
    return dropped


def _norms_after(now: Succession, fragment: int, members: Sequence[Member]) -> tuple[float, ...]:
    norms = [*now.norms, *[0.0] * (fragment + 1 - len(now.norms))]
    norms[fragment] = carried_norm(norms[fragment], [m.norm for m in members if m.weight > 0])
    return tuple(norms)


def _contributed(index: int, member: Member, parts: Sequence[Part]) -> bool:
    """Return whether a member has work in the entry, by the word of another owner if there is one.

    One part suffices: a single owner that names others as missing must not keep them out.
    """
    if member.weight == 0:
        return False
    others = [part for part in parts if part.owner != index]
    missing = [any(p.member == index for p in part.partial) for part in others]
    return not others or not all(missing)


def _remembered(
    now: Succession, kept: Sequence[Elector], position: int, workers: Collection[str]
) -> list[Newcomer]:
    """All that are no electors, those that are known longest first."""
    electors = {e.peer_id for e in kept}
    known = {n.peer_id: n for n in now.newcomers if position - n.last <= REMEMBERED_ENTRIES}
    for elector in now.electorate:  # dropped now: it has been tried before
        since = max(0, position - TRIAL_ENTRIES)
        known[elector.peer_id] = Newcomer(
            peer_id=elector.peer_id, since=since, last=position, entries=TRIAL_ENTRIES
        )
    for peer in workers:
        before = known.get(peer)
        since, entries = (before.since, before.entries) if before else (position, 0)
        known[peer] = Newcomer(
            peer_id=peer, since=since, last=position, entries=min(entries + 1, TRIAL_ENTRIES)
        )
    others = [n for n in known.values() if n.peer_id not in electors]
    return sorted(others, key=lambda n: (n.since, n.peer_id))


def _promoted(known: Sequence[Newcomer], workers: Collection[str], electors: int) -> list[Newcomer]:
    new = 1 if electors < FEW_ELECTORS else int(NEW_PER_OLD * electors)
    room = min(new, MAX_ELECTORS - electors)
    tried = [n for n in known if n.peer_id in workers and n.entries >= TRIAL_ENTRIES]
    return tried[: max(0, room)]
