"""Agreement on one entry a position: its group, its ballots, its certificate, its dissemination.

The rules are machines without sockets, which tests drive through every order of events: `ballots`
for votes, `round` for the leader, `member` for its members. Drivers do what the machines ask for.
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.peer.rounds.consensus.member import MemberRound
    from atoll.peer.rounds.consensus.round import Round
    from atoll.peer.rounds.consensus.voter import Voter

__all__ = ["MemberRound", "Round", "Voter"]

__getattr__ = exports(__name__, {"MemberRound": "member", "Round": "round", "Voter": "voter"})
