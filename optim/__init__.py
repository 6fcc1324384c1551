"""Optimizers of Atoll: outer state, methods, and the seam to whatever reduces.

model, inner = ...                      # yours
diloco = DiLoCo(model, inner, reducer, inner_steps=30)
for batch in data:
    loss = ...
    loss.backward()
    diloco.step(tokens=batch.numel(), loss=loss)    # in place of inner.step()
    inner.zero_grad()
"""

from atoll.optim.layout import CELL, Layout, LayoutError
from atoll.optim.outer import nesterov
from atoll.optim.reducer import Commit, Contribution, Reducer
from atoll.optim.state import Assembly, OuterState, StateError, merkle_root

__all__ = [
    "CELL",
    "Assembly",
    "Commit",
    "Contribution",
    "Layout",
    "LayoutError",
    "OuterState",
    "Reducer",
    "StateError",
    "merkle_root",
    "nesterov",
]
