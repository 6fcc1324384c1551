"""A module: a part of a run's parameters that is decided in a log of its own; a dense run has one.

A replica is given its log's `Module`, and asks for nothing else of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from atoll.optim.log.entry import Trust, sha256
from atoll.optim.log.replay import Replay
from atoll.optim.methods.base import Method
from atoll.optim.state.layout import Layout

WHOLE = ""  # the module of a dense run, which has one log


def log_id(run_id: bytes, module: str) -> bytes:
    """Return the id of a module's log: the run's own for a dense run, else bound to the name.

    So nothing that is signed for one log of a run counts in another.
    """
    if module == WHOLE:
        return run_id
    return sha256(b"atoll module 1" + run_id + module.encode())


def log_folder(module: str) -> str:
    """Return the name of the folder in which a module's log lies."""
    return module or "log"


@dataclass(frozen=True, kw_only=True)
class Module:
    """A part of the parameters of a run, decided in one log."""

    run_id: bytes
    """The id of its log (`log_id`), which entries, votes and epochs name."""
    method: Method
    layout: Layout
    """The parameters that the log decides."""
    snapshot_every: int
    """Positions between two state roots, hence between two snapshots."""
    name: str = WHOLE
    """Its name among the modules of the run."""
    trust: Trust = "crash"
    """Faults of its electors that the run tolerates."""
    units: int = 0
    """Units of a pass over the run's rows (`units.py`); 0 in runs without `data.once`."""

    @cached_property
    def replay(self) -> Replay:
        """The rules that turn a state and an entry into the next state.

        Raises:
            MethodError: the method keeps no common state, as gossip does; it has no log.
        """
        return Replay(self.method, self.layout)
