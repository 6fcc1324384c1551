"""The reducer of a trainer that sees what is decided, and can have its window dropped."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from atoll.optim.reducer import Commit, Contribution, Reducer, Settle
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout


class WatchedReducer:
    """A reducer that tells the trainer when something is decided, and can send it back."""

    def __init__(self, inner: Reducer, on_commit: Callable[[Commit], None]) -> None:
        """`on_commit` is told of each decision before the method is."""
        self._fragments: set[int] = set()
        self._inner, self._on_commit = inner, on_commit
        self._settle: Settle | None = None

    @property
    def position(self) -> int:
        """Of the reducer."""
        return self._inner.position

    @property
    def fragments(self) -> Sequence[Fragment]:
        """Of the reducer."""
        return self._inner.fragments

    @property
    def unsettled(self) -> bool:
        """Whether a contribution is under way."""
        return bool(self._fragments)

    def start(self, layout: Layout, params_N: Tensor, settle: Settle) -> Tensor:
        """As the reducer does."""
        self._settle = settle
        return self._inner.start(layout, params_N, self._deliver)

    def submit(self, contribution: Contribution) -> None:
        """Hand in a contribution, which is then under way."""
        self._fragments.add(contribution.fragment)
        self._inner.submit(contribution)

    def wait(self) -> None:
        """As the reducer does."""
        self._inner.wait()

    def state_dict(self) -> dict[str, Any]:
        """The reducer's, and what is under way."""
        return {"inner": self._inner.state_dict(), "unsettled": sorted(self._fragments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave."""
        self._fragments = set(state["unsettled"])
        self._inner.load_state_dict(state["inner"])

    def go_back(self, position: int, params_N: Tensor) -> None:
        """Have the method drop its window, as when the reducer itself asks for it."""
        self._deliver(
            Commit(position=position, params_N=params_N, included=None, members=0, reset=True)
        )

    def _deliver(self, commit: Commit) -> None:
        assert self._settle is not None, "a reducer settles after start"
        self._on_commit(commit)
        self._settle(commit)
        if commit.reset:
            self._fragments.clear()
        elif commit.settles:
            self._fragments.discard(commit.fragment)
