"""The reducer between a trainer and its method: reports commits and can drop the window."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from atoll.optim.reducer import Commit, Contribution, Reducer, Settle
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout


class WatchedReducer:
    """Passes a reducer through, reports each commit to the trainer and can drop its window."""

    def __init__(self, inner: Reducer, on_commit: Callable[[Commit], None]) -> None:
        """Wrap a reducer.

        Args:
            inner: the reducer of the run.
            on_commit: called with each commit, before the method receives it.
        """
        self._fragments: set[int] = set()
        self._inner, self._on_commit = inner, on_commit
        self._settle: Settle | None = None

    @property
    def position(self) -> int:
        """Position of the log that the wrapped reducer has reached."""
        return self._inner.position

    @property
    def fragments(self) -> Sequence[Fragment]:
        """Fragments of the wrapped reducer."""
        return self._inner.fragments

    @property
    def unsettled(self) -> bool:
        """Return whether a submitted contribution awaits its commit."""
        return bool(self._fragments)

    def start(self, layout: Layout, params_N: Tensor, settle: Settle) -> Tensor:
        """Start the wrapped reducer and return its parameters; see `Reducer.start`."""
        self._settle = settle
        return self._inner.start(layout, params_N, self._deliver)

    def submit(self, contribution: Contribution) -> None:
        """Submit a contribution and count it as unsettled."""
        self._fragments.add(contribution.fragment)
        self._inner.submit(contribution)

    def wait(self) -> None:
        """Wait until the wrapped reducer has settled; see `Reducer.wait`."""
        self._inner.wait()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped reducer and the unsettled fragments."""
        return {"inner": self._inner.state_dict(), "unsettled": sorted(self._fragments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._fragments = set(state["unsettled"])
        self._inner.load_state_dict(state["inner"])

    def go_back(self, position: int, params_N: Tensor) -> None:
        """Make the method drop its window and continue from `params_N`, as a reset commit does."""
        self._deliver(
            Commit(position=position, params_N=params_N, included=None, members=0, reset=True)
        )

    def _deliver(self, commit: Commit) -> None:
        assert self._settle is not None, "a reducer settles only after start"
        self._on_commit(commit)
        self._settle(commit)
        if commit.reset:
            self._fragments.clear()
        elif commit.settles:
            self._fragments.discard(commit.fragment)
