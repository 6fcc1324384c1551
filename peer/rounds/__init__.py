"""Rounds: peers that do not trust each other decide the log, position after position.

`engine.Rounds` is the entry point; it comes after all rooms of this package, so it is not exported
here. A round finds its group, reduces the group's contributions
(`allreduce`), and agrees on the result by votes (`consensus`). It survives the loss of any peer,
its leader's too, as long as a quorum of electors lives; docs/protocol.md has the rules.
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.peer.rounds.context import Context, RoundSettings

__all__ = ["Context", "RoundSettings"]

__getattr__ = exports(__name__, {"Context": "context", "RoundSettings": "context"})
