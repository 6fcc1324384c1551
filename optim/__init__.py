"""Optimizers of Atoll: outer state, methods, and the seam to whatever reduces.

The methods of the field are in `atoll.optim.methods`, by name; DiLoCo in three lines:

model, inner = ...                      # yours
diloco = DiLoCo(model, inner, reducer, inner_steps=30)
for batch in data:
    loss = ...
    loss.backward()
    diloco.step(tokens=batch.numel(), loss=loss)    # instead of inner.step()
    inner.zero_grad()
"""

from atoll.optim.inprocess import (
    GossipGroup,
    GroupError,
    GroupStatistics,
    InProcessGroup,
    in_process,
)
from atoll.optim.methods.diloco import DiLoCo, outer_defaults
from atoll.optim.methods.worker import Worker, WorkerStatistics
from atoll.optim.reducer import Commit, Contribution, Reducer
from atoll.optim.reduction.cells import Cells, UpdateError
from atoll.optim.reduction.contribution import Feedback, Offer
from atoll.optim.state.layout import CELL, Layout, LayoutError
from atoll.optim.state.outer_state import Assembly, OuterState, StateError, merkle_root
from atoll.optim.state.outer_step import nesterov

__all__ = [
    "CELL",
    "Assembly",
    "Cells",
    "Commit",
    "Contribution",
    "DiLoCo",
    "Feedback",
    "GossipGroup",
    "GroupError",
    "GroupStatistics",
    "InProcessGroup",
    "Layout",
    "LayoutError",
    "Offer",
    "OuterState",
    "Reducer",
    "StateError",
    "UpdateError",
    "Worker",
    "WorkerStatistics",
    "in_process",
    "merkle_root",
    "nesterov",
    "outer_defaults",
]
