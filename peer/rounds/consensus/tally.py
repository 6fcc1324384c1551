"""Votes that the electors of a small electorate tell each other.

A vote that goes to everyone makes the certificate everywhere half a round trip after the quorum
voted, instead of one and a half by way of the leader. It also outlives the leader. In larger
electorates that is too many messages, and the leader's commit brings the certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import Tasks
from atoll.dht.transport import Refused
from atoll.optim.log.entry import Certificate, Elector, Entry, Vote, is_quorum, vote_payload
from atoll.peer.rounds.conduct import Fault
from atoll.peer.rounds.context import Context
from atoll.peer.rounds.messages import Voted

MAX_ELECTORS = 8  # of an electorate in which votes go to all: 56 messages of 200 bytes

OnCertified = Callable[[Entry, Certificate], None]


class Tally:
    """The votes of one position, as they reach one elector."""

    def __init__(self, ctx: Context, on_certified: OnCertified) -> None:
        """No votes yet; `on_certified` is called when a quorum voted for what this peer did."""
        self._ctx = ctx
        self._on_certified = on_certified
        self._electorate: tuple[Elector, ...] = ()
        self._votes: dict[int, Voted] = {}
        """the last one of each elector"""
        self._own: tuple[Entry, Voted] | None = None
        self._telling = Tasks()

    def turn(self, electorate: Sequence[Elector]) -> None:
        """Forget the votes: another position is decided now."""
        self._electorate = tuple(electorate)
        self._votes.clear()
        self._own = None

    def know(self, electorate: Sequence[Elector]) -> None:
        """Take the electorate of a position at which nobody was known to vote before."""
        if not self._electorate:
            self._electorate = tuple(electorate)

    def vote(self, entry: Entry, voted: Voted, leader: str) -> None:
        """This elector voted; its leader has it by the answer."""
        if len(self._electorate) > MAX_ELECTORS:
            return
        me = self._ctx.me.peer_id
        others = {elector.peer_id for elector in self._electorate} - {me, leader}
        for peer in sorted(others):
            self._telling.spawn(self._tell(peer, voted))
        if leader != me:
            self._own = entry, voted
            self._votes[self._index(me)] = voted
            self._count()

    def take(self, remote: str, voted: Voted) -> None:
        """Another elector's vote, looked at when this peer has voted too.

        Raises:
            Refused: it is no elector here.
        """
        self._votes[self._index(remote)] = voted
        self._count()

    async def close(self) -> None:
        """End the calls that are under way."""
        await self._telling.close()

    async def _tell(self, peer: str, voted: Voted) -> None:
        """Send a vote; the leader's commit comes in any case, so a lost one only costs time."""
        timeout_s = self._ctx.settings.stall_s
        await self._ctx.transport.call(peer, "voted", voted.encode(), timeout_s=timeout_s)

    def _index(self, peer: str) -> int:
        for index, elector in enumerate(self._electorate):
            if elector.peer_id == peer:
                return index
        raise Refused(RefusalCode.NO_ELECTOR, "expected a vote of an elector of this position")

    def _count(self) -> None:
        """Make the certificate if there is a quorum for what this elector voted for."""
        if self._own is None:
            return
        entry, own = self._own
        same = [i for i, v in sorted(self._votes.items()) if _what(v) == _what(own)]
        if is_quorum(same, len(self._electorate)):
            valid = [i for i in same if self._is_valid(i, entry)]
            if is_quorum(valid, len(self._electorate)):
                self._own = None
                votes = tuple(Vote(elector=i, signature=self._votes[i].signature) for i in valid)
                self._on_certified(entry, Certificate(attempt=own.attempt, votes=votes))

    def _is_valid(self, index: int, entry: Entry) -> bool:
        vote, peer = self._votes[index], self._electorate[index].peer_id
        if self._ctx.verify(peer, vote_payload(entry, vote.attempt), vote.signature):
            return True
        del self._votes[index]
        self._ctx.fault(peer, Fault.BAD_VOTE)
        return False


def _what(vote: Voted) -> tuple[int, bytes]:
    return vote.attempt, vote.entry
