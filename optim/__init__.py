"""Optimizers of Atoll: outer state, methods, and the seam to whatever reduces.

model, inner = ...                      # yours
diloco = DiLoCo(model, inner, reducer, inner_steps=30)
for batch in data:
    loss = ...
    loss.backward()
    diloco.step(tokens=batch.numel(), loss=loss)    # in place of inner.step()
    inner.zero_grad()
"""

from atoll.optim.defaults import outer_defaults
from atoll.optim.diloco import DiLoCo, DiLoCoStatistics
from atoll.optim.feedback import Feedback, Offer
from atoll.optim.inprocess import GroupError, GroupStatistics, InProcessGroup
from atoll.optim.layout import CELL, Layout, LayoutError
from atoll.optim.outer import nesterov
from atoll.optim.reducer import Commit, Contribution, Reducer
from atoll.optim.state import Assembly, OuterState, StateError, merkle_root
from atoll.optim.update import UpdateError, decode_update, encode_cells

__all__ = [
    "CELL",
    "Assembly",
    "Commit",
    "Contribution",
    "DiLoCo",
    "DiLoCoStatistics",
    "Feedback",
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
    "decode_update",
    "encode_cells",
    "merkle_root",
    "nesterov",
    "outer_defaults",
]
