"""The arithmetic of one reduction, the same in one process and over the network.

A peer weighs and encodes a contribution (`contribution`) in cells (`cells`). The owner of a part
reduces them to a mean, which may be sparse (`sparse_mean`), robust (`robust`), or made of the
factors of matrices (`lowrank`).
"""

from atoll.optim.reduction.cells import Cells, UpdateError
from atoll.optim.reduction.contribution import Feedback, Offer, WorkRefused
from atoll.optim.reduction.robust import REDUCERS, ReducerName

__all__ = [
    "REDUCERS",
    "Cells",
    "Feedback",
    "Offer",
    "ReducerName",
    "UpdateError",
    "WorkRefused",
]
