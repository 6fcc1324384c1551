"""Local training: model, data, device, saved state and the training loop.

`Trainer` is the entry point. The package loads a module with its first use, so that a command can
import `atoll.peer.training.data` without waiting for torch.
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.peer.training.learner import Learner
    from atoll.peer.training.statistics import TrainerStatistics
    from atoll.peer.training.trainer import Trainer

__all__ = ["Learner", "Trainer", "TrainerStatistics"]

__getattr__ = exports(
    __name__, {"Learner": "learner", "Trainer": "trainer", "TrainerStatistics": "statistics"}
)
