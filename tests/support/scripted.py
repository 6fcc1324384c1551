"""A reducer whose commits a test writes."""

from torch import Tensor

from atoll.optim.reducer import Commit, Contribution
from atoll.optim.state.fragments import whole


class ScriptedReducer:
    """Delivers the commits that a test puts in `queue`, one list a wait."""

    position = 0

    def __init__(self) -> None:
        self.submitted: list[Contribution] = []
        self.queue: list[list[Commit]] = []

    def start(self, layout, params_N, settle) -> Tensor:
        self.fragments = (whole(layout),)
        self.settle = settle
        return params_N

    def submit(self, contribution) -> None:
        self.submitted.append(contribution)

    def wait(self) -> None:
        for commit in self.queue.pop(0) if self.queue else []:
            self.settle(commit)

    def state_dict(self):
        return {}

    def load_state_dict(self, state) -> None:
        pass
