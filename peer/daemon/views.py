"""The views that the two processes of a peer have of each other, renewed all the time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from atoll.coordinator.run.status import TimeUse
from atoll.optim.reducer import AS_PLANNED, Course
from atoll.peer.daemon.options import StageMove


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts of a run that a trainer needs, known once its peer has joined."""

    spec: bytes
    """In canonical JSON."""
    peer_id: str
    module: str
    """The module whose log the peer follows; empty in a dense run."""
    position: int
    num_fragments: int
    is_keeper: bool
    """True if the peer leads and votes instead of training."""


@dataclass(frozen=True, kw_only=True)
class PeerView:
    """The place of a peer in its run, as its network process shows it."""

    position: int = 0
    """Entries applied; by gossip, the round."""
    course: Course = AS_PLANNED
    """The course of training from there on."""
    is_complete: bool = False
    """True if all rounds of all stages of a pipeline are committed."""
    moves: StageMove | None = None
    """The move for which the peer leaves its stage, once what was in work there is done."""
    failure: Exception | None = None
    """Reason why the peer takes part in nothing more, such as a full disk."""


@dataclass(frozen=True, kw_only=True)
class TrainerView:
    """A peer's report on its trainer."""

    ready_at_s: float = 0.0
    """When the open window is expected to end, by `time.monotonic`, which processes share."""
    step_s: float = 0.0
    step: int = 0
    inner_steps: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    able_tokens_per_s: float = 0.0
    """That a stage of a pipeline can do if there is always work; 0 if unknown."""
    loss: float | None = None
    valid_loss: float | None = None
    utilisation: float = 1.0
    time_shares: dict[TimeUse, float] = field(default_factory=dict)
    """All of the time by use; empty if it is not told apart."""
    device: str = ""

    @property
    def ready_in_s(self) -> float:
        """Seconds from now until the open window is expected to end; 0 if it should have."""
        return max(0.0, self.ready_at_s - time.monotonic())
