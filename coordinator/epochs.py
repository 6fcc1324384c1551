"""Opening epochs: the first with enough peers, later ones when the run is stalled.

Heartbeats alone elect no peer: anyone with an invite can send them under as many keys as it likes.

    epoch 0      trainers that answer a `head` call with the chain of the first state
    later ones   the electors online, and half as many newcomers that have been tried; if no elector
                 is, all such newcomers; then the members with weight of the newest entries; then
                 those that answer a `head` call with a log that fits
    keepers      if the spec names keepers, all of them that answer a `head` call, and nobody else;
                 keepers that join wait for an epoch, which opens for them between two rounds, as
                 one does at once without a keeper that was evicted
    gossip       whoever reports ready: its one epoch only starts the run, nobody votes in it

If the log here lacks an epoch that has left (`EpochSigner`), or rounds that the history knows, none
is opened: the newest record is learned from the peers first, and recovery fetches the entries. That
peers answer without it proves nothing, as anyone can answer: only the organiser gives it up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from atoll.coordinator import notices
from atoll.coordinator.heads import Heads, PeerHead
from atoll.coordinator.ledger import contributors
from atoll.coordinator.policies import (
    MAX_INCARNATION_CHARS,
    KeepersWaiting,
    LostQuorum,
    Retired,
    StallClock,
    can_decide,
    common_position,
    electable,
    electors_after_stall,
    hold_quorum,
    not_restarted,
)
from atoll.coordinator.presence import MAX_PEERS, KnownPeer
from atoll.coordinator.run.notice import Report
from atoll.coordinator.run.status import PeerStatus
from atoll.coordinator.signing import EpochSigner
from atoll.optim.log.entry import (
    Elector,
    Entry,
    LogError,
    choose_electors,
    first_sound_term,
    leader_order,
)
from atoll.optim.log.live_replica import LiveReplica

# After a round, so long no other is decided, in most runs: an epoch that opens for keepers then
# voids nothing. In faster runs the replicas go back, and no contribution is lost.
BETWEEN_ROUNDS_S = 5.0
NEWEST = 8  # entries whose members may vote: more than a restart of half the swarm takes
LEARN_S = 60.0  # of answers, if it is not known which epoch is the newest


class Cause(Enum):
    """A reason to open an epoch in a run that does not stand still."""

    ELECTORS_LEFT = "electors_left"
    ELECTORS_LOST = "electors_lost"  # they restarted, or fell silent
    KEEPERS_CHANGED = "keepers_changed"  # some joined, or were evicted


class Epochs:
    """Opens epochs at the head of the coordinator's replica. Times are of any steady clock."""

    def __init__(
        self,
        replica: LiveReplica,
        *,
        signer: EpochSigner,
        min_peers: int,
        min_keepers: int = 0,
        known_rounds: int = 0,
        may_begin: Callable[[], bool] = lambda: True,
        is_evicted: Callable[[str], bool] = lambda peer_id: False,
        orders_wait: Callable[[], bool] = lambda: False,
        report: Report,
    ) -> None:
        """Open epochs of a replica.

        Args:
            replica: the coordinator's replica.
            signer: signs with the run's key.
            min_peers: trainers that must hold the first state before the first epoch opens.
            min_keepers: keepers that must answer before any epoch opens; 0 if members vote.
            known_rounds: rounds that the history knows; fewer in the log are a loss.
            may_begin: returns whether the first epoch may open, as far as others decide it.
            is_evicted: returns whether the organiser put a PeerID out.
            orders_wait: returns whether the log lacks orders.
            report: logs an event.
        """
        self._known_rounds = known_rounds
        self._may_begin = may_begin
        self._is_evicted = is_evicted
        self._orders_wait = orders_wait
        self._replica = replica
        self._signer = signer
        self._min_peers = min_peers
        self._min_keepers = min_keepers
        self._keepers_waiting = KeepersWaiting()
        self._keepers_missing: int | None = None
        self._report = report
        self._progress = StallClock()
        self._lost = LostQuorum()
        self._retired: Retired = {}
        self._behind_reported = False
        self.heads: Heads | None = None
        """Asks peers where they stand; None in a gossip run, and before there is a node."""
        self.is_by_heartbeats = False
        """True in a gossip run, which has no votes."""
        self.is_stuck = False
        """True if peers are ahead, and nobody has what this replica needs to follow them."""
        self._asked_since_s: float | None = None

    @property
    def _is_open(self) -> bool:
        return self._replica.opened is not None

    @property
    def lacks_epochs(self) -> bool:
        """Return whether an epoch has left that is not in the log here, or may have."""
        opened, left = self._replica.opened, self._signer.left
        return left is None or left > (opened.epoch if opened is not None else -1)

    @property
    def lacks_entries(self) -> bool:
        """Return whether the log here ends before the base of its newest epoch, or lost rounds."""
        replica, opened = self._replica, self._replica.opened
        if self.is_by_heartbeats:
            return False
        if replica.position < self._known_rounds:
            return True
        return opened is not None and (
            replica.position < opened.base_position or not replica.electorate
        )

    def retire(self, status: PeerStatus) -> None:
        """Note that a peer resigned: it has not voted from its position on, and never will."""
        if len(self._retired) >= MAX_PEERS:  # anyone can invent incarnations
            del self._retired[next(iter(self._retired))]
        self._retired[status.peer_id, status.incarnation] = status.epoch, status.position

    def note(self, alive: Sequence[KnownPeer], now_s: float, round_s: float) -> None:
        """Note how far the run is, by the peers online; `round_s` is the length of a round."""
        head = self._replica.head
        furthest = common_position(alive, epoch=head.epoch) if self._is_open else 0
        self._progress.note(max(head.position, furthest), now_s, round_s)

    def rest(self, now_s: float) -> None:
        """Exclude the time of a run that is paused: nothing is to be decided."""
        self._progress.pause(now_s)

    def is_stalled(self, now_s: float) -> bool:
        """Return whether the run is stalled, or was until an epoch was opened for it."""
        return self._progress.reopened > 0 or self._progress.is_stalled(now_s)

    async def look(self, alive: Sequence[KnownPeer], now_s: float) -> None:
        """Open an epoch if one is due."""
        head = self._replica.head
        if self.lacks_epochs and not self.is_by_heartbeats:
            await self._learn(alive, now_s)
        elif not self._is_open and not self.lacks_entries:
            if self._may_begin():
                await self._open_first(alive, now_s)
        elif self.lacks_entries or not electable(alive, epoch=head.epoch):
            self._progress.pause(now_s)  # nobody to open an epoch with, or nowhere to open it
        # If the electors that have not resigned are no quorum, nothing can be decided at our head,
        # and no peer is beyond it. An epoch that opens there voids nothing, so it need not wait.
        elif not can_decide(
            self._replica.electorate,
            self._retired,
            (head.epoch, head.position),
            self._replica.trust,
        ):
            await self.open(alive, now_s, Cause.ELECTORS_LEFT)
        elif await self._open_without_lost(alive, now_s):
            return
        elif self._is_stalled(alive, now_s) and not self._is_lone(alive):
            await self._open_if_whole(alive, now_s)
        elif self._min_keepers:
            await self._change_keepers(alive, now_s)

    def _is_stalled(self, alive: Sequence[KnownPeer], now_s: float) -> bool:
        """Return whether the run stands still; if it cannot move, without waiting for a round."""
        electorate = self._replica.electorate
        voters = not_restarted(electorate, alive)
        can_move = bool(self._min_keepers) or hold_quorum(voters, electorate)
        return self._progress.is_stalled(now_s, can_move=can_move)

    async def _open_without_lost(self, alive: Sequence[KnownPeer], now_s: float) -> bool:
        """Open an epoch if electors died and the others are no quorum; return whether it did.

        What is lost is asked once more, by the run's network instead of its reports. If any other
        elector has the next entry, that comes first: an epoch here would void it.
        """
        head, electorate = self._replica.head, self._replica.electorate
        lost = self._lost.look(electorate, alive, position=head.position, now_s=now_s)
        if not lost or self._min_keepers or self._is_lone(alive) or self.heads is None:
            return False
        asked = [elector.peer_id for elector in not_restarted(electorate, alive)]
        answers = await self.heads.of(asked, now_s)
        if hold_quorum(set(electorate) - lost | set(_electors(answers)), electorate):
            return False
        keys = {elector.peer_id for elector in electorate}
        told = [m.status for m in alive if m.status.peer_id in keys]
        claimed = [(s.epoch, s.position) for s in told] + [(h.epoch, h.position) for h in answers]
        if any(epoch == head.epoch and position > head.position for epoch, position in claimed):
            return False
        if self._replica.head != head or not await self.open(alive, now_s, Cause.ELECTORS_LOST):
            return False
        self._lost.note_opened(now_s)
        return True

    def _is_lone(self, alive: Sequence[KnownPeer]) -> bool:
        """Return whether a single trainer is online in a run that asks for more.

        It waits (docs/protocol.md, part 2, "Alone"), and no epoch helps it. The clock of a stall
        continues: with the next trainer, an epoch opens without another wait. One that has no state
        yet counts too: it may need the epoch to get one. An order may be decided by it alone.
        """
        least = self._replica.settings.min_peers or self._min_peers
        is_alone = sum(m.status.role == "trainer" for m in alive) == 1
        return least > 1 and is_alone and not self._orders_wait()

    async def open(
        self, alive: Sequence[KnownPeer], now_s: float, cause: Cause | None = None
    ) -> bool:
        """Open a later epoch with the peers that can vote; return False if there are none."""
        if self._min_keepers:
            keepers = electable(alive, epoch=self._replica.head.epoch, role="keeper")
            answers = await self._answers(keepers, now_s)
            return await self._open_with(_electors(answers), now_s, cause)
        known = await self._replica.compute(self._in_newest_entries)
        peers = electable(alive, epoch=self._replica.head.epoch)
        electors = electors_after_stall(
            [Elector(peer_id=p.peer_id, incarnation=p.incarnation) for p in peers],
            self._replica.core.voters,
            known=known,
        )
        if not electors:
            answers = await self._answers(peers, now_s)
            electors = _electors(await self._replica.compute(self._fitting, answers))
        return await self._open_with(electors, now_s, cause)

    async def _open_first(self, alive: Sequence[KnownPeer], now_s: float) -> None:
        # By gossip, peers that train already began before the coordinator lost its files.
        ready = electable(alive, epoch=0 if self.is_by_heartbeats else None)
        keepers = electable(alive, epoch=None, role="keeper") if self._min_keepers else []
        self._note_keepers(len(keepers))
        if len(ready) < self._min_peers or len(keepers) < self._min_keepers:
            return
        electors = [Elector(peer_id=p.peer_id, incarnation=p.incarnation) for p in ready]
        if not self.is_by_heartbeats:
            answers = await self._answers([*ready, *keepers], now_s)
            if await self._adopt_newest(answers):
                return  # peers hold an epoch of this run that the log here has never had
            head = self._replica.head
            here = [h for h in answers if (h.position, h.chain) == (head.position, head.chain)]
            named = {keeper.peer_id for keeper in keepers}
            trainers = _electors(h for h in here if h.peer_id not in named)
            electors = _electors(h for h in here if h.peer_id in named) if named else trainers
            if len(trainers) < self._min_peers:
                return
        if len(electors) >= (self._min_keepers or self._min_peers):
            await self._open_with(electors, now_s)

    async def _change_keepers(self, alive: Sequence[KnownPeer], now_s: float) -> None:
        """Open an epoch for keepers that have waited, or without one that was evicted.

        It opens when everybody stands at the head.
        """
        head, present = self._replica.head, self._replica.electorate
        online = electable(alive, epoch=head.epoch, role="keeper")
        here = [Elector(peer_id=s.peer_id, incarnation=s.incarnation) for s in online]
        waiting = self._keepers_waiting.due(here, present, now_s)
        out = sum(self._is_evicted(keeper.peer_id) for keeper in present)
        if not (waiting or out) or now_s - self._progress.since_s > BETWEEN_ROUNDS_S:
            return
        asked_s = asyncio.get_running_loop().time()
        answers = await self._answers(online, now_s)
        now_s += asyncio.get_running_loop().time() - asked_s
        if now_s - self._progress.since_s > BETWEEN_ROUNDS_S:
            return  # the answers took so long that the next entry may be decided
        named = _electors(answers)
        # An elector that is only slow to answer must not lose its vote to one that joins.
        is_whole = all(keeper in named for keeper in here if keeper in present)
        at_head = all((h.position, h.chain) == (head.position, head.chain) for h in answers)
        joined = sum(keeper in named for keeper in waiting)
        if (joined or out) and is_whole and at_head and self._replica.head == head:
            await self._open_with(named, now_s, Cause.KEEPERS_CHANGED, came=joined, went=out)

    def _note_keepers(self, here: int) -> None:
        """Report that keepers are missing, whenever their number changes."""
        missing = max(0, self._min_keepers - here)
        if missing and missing != self._keepers_missing:
            self._report("info", notices.keepers_missing(missing=missing))
        self._keepers_missing = missing

    async def _open_with(
        self,
        electors: Sequence[Elector],
        now_s: float,
        cause: Cause | None = None,
        *,
        came: int = 0,
        went: int = 0,
    ) -> bool:
        if self._min_keepers and self._is_open:
            self._note_keepers(len(electors))
        again = self._is_open
        # One may have been put out while the others were called.
        electors = [e for e in electors if not self._is_evicted(e.peer_id)]
        if len(electors) < max(1, self._min_keepers):
            return False
        is_stuck = again and cause is None
        chosen = choose_electors(electors)
        self._retired.clear()  # peers that resigned are not electors of the new epoch
        highest = self._signer.highest
        opened = await self._replica.open_epoch(
            chosen,
            self._signer.sign,
            above=-1 if highest is None else highest,
            first_term=self._sound_term(chosen) if is_stuck else 0,
            on_stored=self._signer.note,
        )
        self._progress.restart(now_s, again=is_stuck)
        told = notices.epoch_opened(
            epoch=opened.epoch,
            position=opened.base_position,
            electors=len(chosen),
            role="keeper" if self._min_keepers else "peer",
            cause="" if cause is None else cause.value,
            came=came,
            went=went,
        )
        self._report("info", told)
        return True

    def _sound_term(self, chosen: Sequence[Elector]) -> int:
        """Return the first term at our head that no elector leads whose term failed there.

        Only of the first terms of an epoch is it known here that they have begun. The run stands
        still, so they have failed.
        """
        replica, position = self._replica, self._replica.position
        opened = replica.opened
        if opened is None or not replica.electorate:
            return 0
        begun = opened.first_term if position == opened.base_position else 0
        order = leader_order(replica.electorate, position)[: begun + 1]
        failed = {replica.electorate[index].peer_id for index in order}
        return first_sound_term(chosen, position, failed)

    def _in_newest_entries(self) -> set[str]:
        """Return the PeerIDs that the newest entries name as electors or members; blocks.

        They vote only when no elector and no tried newcomer is left. A member of weight 0 gave no
        work: keys cost nothing, so it does not vote.
        """
        replica = self._replica
        opened = replica.opened.electorate if replica.opened is not None else ()
        named = {elector.peer_id for elector in (*opened, *replica.electorate)}
        for record in replica.store.headers(max(0, replica.position - NEWEST), NEWEST):
            entry = Entry.decode(record.entry)
            named.update(elector.peer_id for elector in entry.electorate)
            named.update(newcomer.peer_id for newcomer in entry.newcomers)
            named.update(m.peer_id for m in contributors(entry) if m.weight > 0)
        return named

    def _fitting(self, answers: Sequence[PeerHead]) -> list[PeerHead]:
        """Return the answers whose log is this one, or an earlier part of it; blocks."""
        return [h for h in answers if h.chain == self._chain_at(h.position)]

    def _chain_at(self, position: int) -> bytes | None:
        replica = self._replica
        if position == replica.position:
            return replica.chain
        before = replica.store.get(position - 1) if position else None
        if before is None:
            return replica.store.genesis_chain if position == 0 else None
        return before.chain

    async def _answers(self, peers: Sequence[PeerStatus], now_s: float) -> list[PeerHead]:
        """Return the answers of these peers, as far as they can vote."""
        if self.heads is None:
            return []
        answers = await self.heads.of([p.peer_id for p in peers], now_s)
        return [h for h in answers if 0 < len(h.incarnation) <= MAX_INCARNATION_CHARS]

    async def _open_if_whole(self, alive: Sequence[KnownPeer], now_s: float) -> None:
        """Open an epoch unless half of the trainers hold entries that are missing here.

        An epoch at our head would void those entries. If nobody has what it takes to fetch them,
        they are given up: the run would never go on.
        """
        head = self._replica.head
        holders = {status.peer_id for status in electable(alive, epoch=head.epoch)}
        furthest = common_position(
            [member for member in alive if member.status.peer_id in holders], epoch=head.epoch
        )
        ahead = furthest - head.position
        if ahead > 0 and self.is_stuck:
            self._report("warning", notices.rounds_void(rounds=ahead))
        if ahead <= 0 or self.is_stuck:
            await self.open(alive, now_s)
        elif not self._behind_reported:
            self._report("warning", notices.rounds_missing(rounds=ahead))
        self._behind_reported = ahead > 0

    # Epochs that were signed and are not in the log

    def report_loss(self) -> None:
        """Report what the log here lacks, if anything."""
        left, rounds = self._signer.left, self._known_rounds
        if self.lacks_epochs:
            lost = notices.log_lost(epoch=left, position=None, known_rounds=None)
        elif self._replica.position < rounds:
            here = self._replica.position
            lost = notices.log_lost(epoch=None, position=here, known_rounds=rounds)
        else:
            return
        self._report("error", lost)

    async def _learn(self, alive: Sequence[KnownPeer], now_s: float) -> None:
        """Adopt the newest epoch that peers hold under this run's key."""
        self._progress.pause(now_s)
        if self.heads is None or not alive:
            return
        answers = await self.heads.of([m.status.peer_id for m in alive], now_s)
        await self._adopt_newest(answers)
        opened = self._replica.opened
        # Peers that the log here does not know have what they were given since: they prove nothing.
        known = await self._replica.compute(self._in_newest_entries)
        heard = sum(answer.peer_id in known for answer in answers)
        if self._signer.left is not None or opened is None or heard < self._min_peers:
            self._asked_since_s = None
            return
        # Nothing here says which epoch is the newest. A peer may answer with an old one, so all
        # that answer within a while are heard.
        self._asked_since_s = now_s if self._asked_since_s is None else self._asked_since_s
        if now_s - self._asked_since_s >= LEARN_S:
            self._signer.note(opened.epoch)

    async def _adopt_newest(self, answers: Sequence[PeerHead]) -> bool:
        """Adopt the newest epoch in the answers; return False if it is none that is new here."""
        opened = self._replica.opened
        newest, record = opened.epoch if opened is not None else -1, b""
        for answer in answers:
            try:
                epoch = self._replica.core.read_epoch(answer.epoch_record)
            except LogError:  # none, or not of this run's key
                continue
            if epoch.epoch > newest:
                newest, record = epoch.epoch, answer.epoch_record
        if not record:
            return False
        await self._replica.adopt(record)
        if self._signer.left is not None:
            self._signer.note(newest)
        self._report("warning", notices.epoch_learned(epoch=newest))
        return True


def _electors(answers: Iterable[PeerHead]) -> list[Elector]:
    return [Elector(peer_id=h.peer_id, incarnation=h.incarnation) for h in answers]
