"""A reducer that a trainer watches: each commit passes it first, and it can drop a window.

# N parameters
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from atoll.optim.reducer import AS_PLANNED, Commit, Contribution, Course, Reducer, Settle
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout
from atoll.optim.state.places import Places
from atoll.peer.training.beside import BesideWaits


class WatchedReducer:
    """Passes a reducer through, reports each commit to the trainer and can drop its window."""

    def __init__(
        self,
        inner: Reducer,
        on_commit: Callable[[Commit], None],
        *,
        beside: BesideWaits | None = None,
        done_units: Callable[[int], int] | None = None,
    ) -> None:
        """Wrap a reducer.

        Args:
            inner: the reducer of the run.
            on_commit: called with each commit, before the method receives it.
            beside: what is done meanwhile by the thread that waits.
            done_units: returns the units behind a contribution, given its tokens.
        """
        self._beside, self._done_units = beside, done_units
        self._fragments: set[int] = set()
        self._inner, self._on_commit = inner, on_commit
        self._settle: Settle | None = None
        self._course: Course | None = None
        """of the last commit"""

    @property
    def course(self) -> Course:
        """Return the course of training at the position of the last commit."""
        first: Course = getattr(self._inner, "course", AS_PLANNED)
        return self._course or first

    @property
    def position(self) -> int:
        """Position of the log that the wrapped reducer has reached."""
        return self._inner.position

    @property
    def fragments(self) -> Sequence[Fragment]:
        """Fragments of the wrapped reducer."""
        return self._inner.fragments

    @property
    def places(self) -> Places | None:
        """The values that this rank keeps; None if it keeps all."""
        return getattr(self._inner, "places", None)

    @property
    def begins(self) -> bool:
        """Return whether `start` wants the parameters of this rank."""
        return getattr(self._inner, "begins", True)

    @property
    def recovers(self) -> bool:
        """Return whether `start` takes the parameters from a log that is stored."""
        return getattr(self._inner, "recovers", False)

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
        if self._done_units is not None:
            units = self._done_units(contribution.tokens)
            contribution = replace(contribution, units=units)
        self._inner.submit(contribution)

    def wait(self) -> None:
        """Wait until the wrapped reducer has settled; see `Reducer.wait`."""
        if self._beside is None:
            self._inner.wait()
        else:
            self._beside.wait(self._inner.wait)

    def close(self) -> None:
        """End what waits beside the trainer; the wrapped reducer stays open."""
        if self._beside is not None:
            self._beside.close()

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
            Commit(
                position=position,
                params_N=params_N,
                included=None,
                members=0,
                reset=True,
                course=self.course,
            )
        )

    def _deliver(self, commit: Commit) -> None:
        with nullcontext() if self._beside is None else self._beside.turns.taken():
            self._take(commit)

    def _take(self, commit: Commit) -> None:
        assert self._settle is not None, "a reducer settles only after start"
        self._course = commit.course
        self._on_commit(commit)
        self._settle(commit)
        if commit.reset:
            self._fragments.clear()
        elif commit.settles:
            self._fragments.discard(commit.fragment)
