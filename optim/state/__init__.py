"""The common state: layout of the flat vector, its fragments, outer state and outer step.

A model's parameters become one vector (`layout`), of which a method reduces fragments. Every
replica applies the decided updates (`updates`) to the same outer state (`outer_state`) by the same
arithmetic (`outer_step`). `vectors` reuses the memory of long vectors.
"""

from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import CELL, Layout, LayoutError
from atoll.optim.state.outer_state import Assembly, OuterState, StateError, merkle_root
from atoll.optim.state.pieces import FragmentError

__all__ = [
    "CELL",
    "Assembly",
    "Fragment",
    "FragmentError",
    "Layout",
    "LayoutError",
    "OuterState",
    "StateError",
    "merkle_root",
]
