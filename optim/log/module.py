"""The subject of one log: a part of the parameters, and the rules that read its entries.

A run decides each part of its parameters in a log of its own. A dense run has one part, all of
them, so one log; whoever follows a log is given its `Module` and asks for nothing else of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from atoll.optim.log.replay import Replay
from atoll.optim.methods.base import Method
from atoll.optim.state.layout import Layout

WHOLE = "log"  # the only log of a dense run, and the folder in which a coordinator keeps it


@dataclass(frozen=True, kw_only=True)
class Module:
    """A part of the parameters of a run, decided in one log."""

    run_id: bytes
    method: Method
    layout: Layout
    """The parameters that the log decides."""
    snapshot_every: int
    """Positions between two state roots, hence between two snapshots."""
    name: str = WHOLE
    """The name of its log among those of the run."""

    @cached_property
    def replay(self) -> Replay:
        """The rules that turn a state and an entry into the next state.

        Raises:
            MethodError: the method keeps no common state, as gossip does; it has no log.
        """
        return Replay(self.method, self.layout)
