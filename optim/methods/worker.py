"""A peer's side of a method: the object that replaces the inner optimizer in a training loop.

    synced   parameters that every replica holds in the same bits (by gossip: this peer's own)
             of a peer of several ranks, each keeps its own range of all vectors (`places`)
    local    what this peer trains: the model's own tensors
    delta    what it sends at the end of a window, of one fragment

Each fragment of the group's method has its own window of H inner steps, at its own offset, by its
turn in the log; if the log advanced without this peer, at that turn again. A contribution that is
handed in stays pending until a commit settles it; the commit is taken `delay` inner steps later,
so that a reduction may travel while training continues. With a delay of 0 the peer waits.

A subclass defines the contribution (`_delta`) and how local follows a commit (`_follow`).
"""

from __future__ import annotations

import logging
import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from atoll.optim.methods import loops
from atoll.optim.methods.windows import LossMean, PendingWindow, Window
from atoll.optim.reducer import Commit, Contribution, Course, Reducer
from atoll.optim.state import vectors
from atoll.optim.state.fragments import Difference, Fragment
from atoll.optim.state.layout import Layout, LayoutError
from atoll.optim.state.outer_state import is_finite
from atoll.optim.state.parts import TensorPart, TensorParts
from atoll.optim.state.places import Places, WholePlaces

if TYPE_CHECKING:
    from atoll.optim.methods.base import Method

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerStatistics:
    """Statistics of a peer's training."""

    position: int = 0
    """Position of the log that synced stands at."""

    steps: int = 0
    """Inner steps done."""

    tokens: int = 0
    """Tokens trained on."""

    windows: int = 0
    """Windows ended, of all fragments."""

    included: int = 0
    """Contributions that made it into an entry, wholly or in part."""

    left_out: int = 0
    """Contributions that were decided without; their work is in the next one."""

    resets: int = 0
    """Times the reducer told us to drop our drift."""

    discarded: int = 0
    """Windows dropped because their result was not finite."""

    loss: float = float("nan")
    """Mean training loss of the last window that ended."""

    compute_s: float = 0.0
    """Seconds between waits, spent in the caller's loop and the inner optimizer."""

    wait_s: float = 0.0
    """Seconds spent handing in and waiting; no step was computed in them."""

    outer_s: float = 0.0
    """Seconds of `compute_s` that passed at the ends of windows: copies and the outer step."""


class Worker(ABC):
    """Counts steps, hands in contributions and takes commits, for any method."""

    keeps_work: ClassVar[bool] = True
    """True if the next contribution holds what an update left out; a lost gradient is gone."""

    sends_gradients: ClassVar[bool] = False
    """True if the inner optimizer never steps: commits alone move the parameters."""

    saves_drift: ClassVar[bool] = True
    """True if local moves along with synced, so that its distance from there is what to save."""

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        reducer: Reducer,
        *,
        inner_steps: int,
        delay: int = 0,
        method: Method | None = None,
    ) -> None:
        """Join the reducer and take its parameters.

        Args:
            model: any module; its trainable parameters sync, its buffers do not.
            inner: optimizer over these parameters, or several; its state persists over windows.
            reducer: an `InProcessGroup` member, or the networked one.
            inner_steps: H, steps of a window; `resize` changes it.
            delay: inner steps between handing in and taking the commit.
            method: the options of workers that have some; `Method.worker` passes itself.

        Raises:
            ValueError: when inner_steps is below 1, the delay is not in [0, inner_steps], the
                optimizer needs a closure, or the reducer's method has another worker.
            LayoutError: when the model has no trainable floating point parameters, or none of them
                is the optimizer's.
        """
        _expect_window(inner_steps, delay)
        if method is None:
            _expect_worker_of(reducer, type(self))
        self.model = model
        self.inner = loops.as_one(inner)
        self.reducer = reducer
        self.inner_steps = inner_steps
        self.delay = delay
        self.method = method
        self.make_room: Callable[[], None] = lambda: None
        """called before contributions are made, which take memory: drops what a step took"""
        self._delay_share = delay / inner_steps
        self.layout = Layout.of(model)
        loops.expect_optimizer_of(model, self.inner)
        self._steps = loops.StepWatch(loops.parts_of(self.inner))
        self._buffers: loops.BufferWatch | None = loops.BufferWatch(model)
        """until the first window has ended"""
        self._statistics = WorkerStatistics()
        self._arrived: list[Commit] = []
        self._decided = 0
        begins = getattr(reducer, "begins", True)  # of several ranks one gives the parameters
        params_N = self.layout.flatten(model, None if begins else ())
        synced_N = reducer.start(self.layout, params_N, self._settle)
        self._log_position = reducer.position
        """after all commits that came, also those that are not taken yet"""
        self._statistics = WorkerStatistics(position=reducer.position)
        places: Places | None = getattr(reducer, "places", None)
        self.places = places or WholePlaces(self.layout, reducer.fragments)
        """the values that this process keeps"""
        self.fragments = self.places.fragments
        self._synced = self._cut(synced_N)
        """what all replicas share, a vector a fragment; each is replaced, never changed"""
        self._windows = [Window() for _ in self.fragments]
        self._begin_windows(reducer.position)
        self.places.load_(model, synced_N)
        self._prepare()
        self._resumed_s = time.perf_counter()

    @property
    def synced_N(self) -> Tensor:  # noqa: N802
        """The parameters that all replicas share, fp32 on the CPU. Read only.

        Of a peer of several ranks, this rank's own values.
        """
        if len(self.fragments) == 1:
            return self._synced[0]
        synced_N = vectors.empty(self.places.numel)
        for fragment, synced_F in zip(self.fragments, self._synced, strict=True):
            fragment.put_cut_(synced_N, synced_F)
        return synced_N

    @property
    def step_in_window(self) -> int:
        """Inner steps done in the open window of the first fragment."""
        return self._windows[0].step_in_window

    @property
    def steps_left(self) -> int:
        """Inner steps until the next window of any fragment ends."""
        return max(1, self.inner_steps - max(w.step_in_window for w in self._windows))

    def steps_since(self, commit: Commit) -> int:
        """Inner steps since the contribution that a commit is about to settle was handed in."""
        pending = self._windows[commit.fragment].pending
        return pending.age if pending is not None and commit.settles else 0

    @property
    def next_position(self) -> int:
        """Position of the log that the open windows are for: all that is under way decided."""
        return self._log_position + len(self._undecided())

    def resize(self, inner_steps: int, *, delay: int | None = None) -> None:
        """Let windows be of so many steps from now on.

        What is done of the open ones keeps its share of a window.

        Args:
            inner_steps: H.
            delay: inner steps between handing in and taking the commit. Left out, the share of a
                window that it was made with: where peers of several speeds have windows of one
                duration, a reduction has as long at all of them.

        Raises:
            ValueError: when the steps are below 1, or the delay is not in [0, inner_steps].
        """
        if delay is None:
            delay = round(self._delay_share * inner_steps)
        _expect_window(inner_steps, delay)
        for window in self._windows:
            window.step_in_window = round(window.step_in_window * inner_steps / self.inner_steps)
        self.inner_steps, self.delay = inner_steps, delay

    def statistics(self) -> WorkerStatistics:
        """Return the statistics of training."""
        return self._statistics

    _step_supports_amp_scaling = True  # else GradScaler would not call a step that it skips

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's, as `torch.amp.GradScaler` reads them."""
        return loops.groups_of(self.inner)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as the inner optimizer does."""
        self.inner.zero_grad(set_to_none)

    def step(self, *, tokens: int, loss: float | Tensor | None = None) -> None:
        """Do an inner step instead of `inner.step()`; at the end of a window, meet the others.

        With a gradient scaler: `scaler.step(worker, tokens=..., loss=...)`. A step that it skips
        counts, with 0 tokens.

        Args:
            tokens: tokens (or samples) that the gradients come from; they weigh this peer.
            loss: the step's loss, for the log of the run.

        Raises:
            ValueError: when tokens is below 1.
            RuntimeError: when the loop has stepped the inner optimizer too.
        """
        if operator.index(tokens) < 1:
            raise ValueError(
                f"expected at least 1 token or sample in a step, got {tokens}: they weigh this "
                "peer's work; for a step that was skipped, call advance(tokens=0)"
            )
        self._expect_own_steps("remove that call, or call advance() instead of step()")
        # `GradScaler.step` sets these attributes for the time of the call.
        if float(getattr(self, "found_inf", 0.0)):
            self.advance(tokens=0)
            return
        if (scale := getattr(self, "grad_scale", None)) is not None:
            loops.unscale_(self.inner, scale)
        with self._steps.own():
            self._train()
        self.advance(tokens=tokens, loss=loss)

    def advance(self, *, tokens: int, loss: float | Tensor | None = None) -> None:
        """Do the rest of `step`, for loops that call `inner.step()` themselves.

        A step that was skipped, as by a gradient scaler, is passed with 0 tokens. Not for methods
        that send gradients, whose inner optimizer never steps: unscale the gradients, then `step`.

        Raises:
            ValueError: when tokens is negative.
            RuntimeError: when the loop has stepped the inner optimizer, and the method sends
                gradients.
        """
        if operator.index(tokens) < 0:
            raise ValueError(f"expected no negative number of tokens, got {tokens}")
        if self.sends_gradients:
            self._expect_own_steps("this method sends gradients: call step() alone")
        self._steps.reset()
        self._count(tokens, loss)
        began_s, waited_s = time.perf_counter(), self._statistics.wait_s
        self._meet()
        stats, now_s = self._statistics, time.perf_counter()
        outer_s = now_s - began_s - (stats.wait_s - waited_s)
        self._statistics = replace(stats, outer_s=stats.outer_s + outer_s)

    def _meet(self) -> None:
        """Take the commits whose time has come, and hand in the windows that have ended."""
        arrived, self._arrived = self._arrived, []
        for commit in arrived:  # again: those whose time has not come are put back
            self._settle(commit)
        if self._overdue():
            self._wait()
        ended = self._ended()
        if ended:
            self.make_room()
            self._wait(tuple(map(self._contribution, ended)))

    def state_dict(self) -> dict[str, Any]:
        """Everything, at any step: model, inner optimizer, reducer and the open windows.

        A worker that loads it continues in the same bits as one that never stopped. Random number
        generators and the place in the data are the caller's. The first fragment's window lies at
        the top, those of others in "fragments". All ranks of a peer call this; the tensors are
        in what the first one gets, whole, so any number of ranks can load them.
        """
        state = self.places.gathered(self.share_dict())
        # A method changes its own vectors in place; all others are replaced.
        own = {name: state[name] for name in self._own_state()}
        return state | {k: v.clone() if isinstance(v, Tensor) else v for k, v in own.items()}

    def share_dict(self) -> dict[str, Any]:
        """Return what `state_dict` does, of several ranks this one's share, in parts.

        It is for use at once: training on changes some of it.

        If the reducer takes synced from a log that is stored, it is left out here, and local is
        stored as its drift, or not at all where it is synced. A window that is saved while it is
        open then continues to the rounding of one addition.
        """
        places, with_synced = self.places, self._saves_synced()
        saves_drift = self.saves_drift and not with_synced
        first, *others = [
            self._window_state(index, whole=with_synced) for index in range(len(self._windows))
        ]
        model = self.model.state_dict()
        trained = self._names(trained=True) if saves_drift else ()
        return {
            "kind": type(self).__name__,
            "layout": self.layout.to_json(),
            "model": places.common_tree({k: v for k, v in model.items() if k not in trained}),
            "inner": places.common_tree(self.inner.state_dict(), alike=True),
            "reducer": self.reducer.state_dict(),
            **({"synced_N": places.common(self.synced_N)} if with_synced else {}),
            **(
                {"drift": [self._drift(i) for i in range(len(self._windows))]}
                if saves_drift
                else {}
            ),
            "inner_steps": self.inner_steps,
            "delay": self.delay,
            "statistics": vars(self._statistics)
            | {"tokens": places.total(self._statistics.tokens)},
            **first,
            **({"fragments": others} if others else {}),
            **({"arrived": [self._common(c) for c in self._arrived]} if self._arrived else {}),
            **self._own_state(),
        }

    def _saves_synced(self) -> bool:
        """Return whether a restart could not have synced from the reducer."""
        # The log is already beyond what commits that came early will move.
        return bool(self._arrived) or not getattr(self.reducer, "recovers", False)

    def _names(self, *, trained: bool) -> set[str]:
        """Return the names, as in the model's state, of parameters that sync or are frozen."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {name for name, param in named if param.requires_grad is trained}

    def _drift(self, index: int) -> Tensor | TensorPart | None:
        """Return what local has more than synced; None if they are equal."""
        local_F, held_F = self.places.flatten(self.model, index), self._held(index)
        if self.places.all_of(torch.equal(local_F, held_F)):
            return None
        return self.places.common(local_F.sub_(held_F), index)

    def _load_drift(self, drifts: Sequence[Tensor | TensorParts | None]) -> None:
        local_N = vectors.empty(self.places.numel)
        for index, drift in enumerate(drifts):
            local_F = self._held(index)
            if drift is not None:
                local_F = local_F + self.places.own(drift, index)
            self.fragments[index].put_cut_(local_N, local_F)
        self.places.load_(self.model, local_N)

    def _window_state(self, index: int, *, whole: bool) -> dict[str, Any]:
        state, places = self._windows[index].state_dict(), self.places
        state["tokens"] = places.total(state["tokens"])
        if (pending := state["pending"]) is not None:
            if not whole:
                # What was on offer is left out by a restart, so nothing is subtracted from local.
                pending["local_N"] = None
            if pending["local_N"] is not None:
                pending["local_N"] = places.common(pending["local_N"], index)
            pending["tokens"] = places.total(pending["tokens"])
        return state

    def _load_window(self, index: int, saved: Mapping[str, Any]) -> None:
        places, pending = self.places, saved["pending"]
        if pending is not None:
            local_F, tokens = pending["local_N"], pending["tokens"]
            pending = pending | {
                "local_N": None if local_F is None else places.own(local_F, index),
                "tokens": places.own_total(tokens),
            }
        tokens = places.own_total(saved["tokens"])
        self._windows[index].load_state_dict(dict(saved) | {"pending": pending, "tokens": tokens})

    def _common(self, commit: Commit) -> dict[str, Any]:
        """Return the fields of a commit, without this process's cut of them."""
        state = vars(commit) | {
            "params_N": self.places.common(commit.params_N),
            "course": asdict(commit.course),
        }
        if commit.included is not None:
            state["included"] = self.places.common_pieces(commit.included, commit.fragment)
        return state

    def _own(self, state: Mapping[str, Any]) -> Commit:
        """Return a commit of the fields that `_common` returned."""
        own: dict[str, Any] = dict(state) | {
            "params_N": self.places.own(state["params_N"]),
            "course": Course(**state["course"]),
        }
        if state["included"] is not None:
            own["included"] = self.places.own_pieces(state["included"], state["fragment"])
        return Commit(**own)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        All ranks of a peer call this; the first one gives the state, the others anything.

        Raises:
            LayoutError: when it was taken of another model or method, or is no worker's.
        """
        self.load_shared(self.places.shared(state))

    def load_shared(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken that `Places.shared` has given to all ranks.

        Frozen parameters that are not in it stay as they are.

        Raises:
            LayoutError: as `load_state_dict`.
        """
        if "layout" not in state:
            raise LayoutError(f"expected what state_dict gave, got only {sorted(state)}")
        kind, windows = state.get("kind"), [state, *state.get("fragments", [])]
        if kind not in (None, type(self).__name__) or len(windows) != len(self._windows):
            raise LayoutError(
                f"expected the state of {type(self).__name__} with {len(self._windows)} fragments, "
                f"got that of {kind} with {len(windows)}; resume with the method that was saved"
            )
        if Layout.from_json(state["layout"]) != self.layout:
            saved = Layout.from_json(state["layout"])
            raise LayoutError(
                "expected the state of this model, got that of another layout; the first "
                f"parameter that differs: {self.layout.difference(saved)}"
            )
        drifts = state.get("drift")
        absent = self._names(trained=False) - set(state["model"])
        but = absent | (self._names(trained=True) if drifts is not None else set())
        self.places.load_model(self.model, state["model"], but=but)
        self.places.load_optimizer(self.inner, state["inner"])
        if "synced_N" in state:
            self._synced = self._cut(self.places.own(state["synced_N"]).clone())
        if drifts is not None:
            self._load_drift(drifts)
        self.inner_steps, self.delay = state["inner_steps"], state["delay"]
        for index, saved in enumerate(windows):
            self._load_window(index, saved)
        self._arrived = [self._own(commit) for commit in state.get("arrived", [])]
        stats = WorkerStatistics(**state["statistics"])
        self._statistics = replace(stats, tokens=self.places.own_total(stats.tokens))
        # Commits that came early are decided but not in synced: the log is already beyond it.
        came = [commit.position for commit in self._arrived]
        self._log_position = max([self._statistics.position, *came])
        self._load_own_state(state)
        self.reducer.load_state_dict(state["reducer"])
        if self._buffers is not None:
            self._buffers = loops.BufferWatch(self.model)  # the saved ones are no news
        self._resumed_s = time.perf_counter()

    def _expect_own_steps(self, remedy: str) -> None:
        if steps := self._steps.others:
            self._steps.reset()
            raise RuntimeError(
                f"the loop has called the inner optimizer's step() {steps} time(s) since the last "
                f"step of {type(self).__name__}, which calls it itself; {remedy}"
            )

    # What a method defines

    @abstractmethod
    def _delta(self, index: int, local_F: Tensor) -> Tensor | Difference:
        """Return what is sent at the end of a window for a fragment with parameters `local`.

        Or what computes it later: then it is finite if local is.
        """

    @abstractmethod
    def _follow(self, commit: Commit, new_F: Tensor, window: Window) -> None:
        """Move local to a commit's parameters; `_synced` still holds those before it.

        `new_F` are those of the commit's fragment, in the order of the vector, as `local_F` is.
        """

    def _train(self) -> None:
        """Change local by what the gradients say."""
        self.inner.step()

    def _prepare(self) -> None:
        """Make what a method keeps beyond the windows, once the reducer has started."""
        self._restart()

    def _handed_in(self, fragment: Fragment) -> None:  # noqa: B027 - a hook
        """Called right after a contribution was submitted."""

    def _restart(self) -> None:  # noqa: B027 - a hook
        """Called when local was set to synced and what was trained is forgotten."""

    def _rate(self) -> float:
        """Inner learning rate that the outer step has to know."""
        return 0.0

    def _own_state(self) -> dict[str, Any]:
        """Return the state that a method keeps beyond the windows."""
        return {}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - a hook
        """Take over what `_own_state` gave."""

    def _held(self, index: int) -> Tensor:
        """Return a fragment's first local parameters: synced, rounded to their dtypes.

        Drift is measured from here: what rounding took was not trained, and is not sent.
        """
        return self.places.held(self.model, self._synced[index], index)

    def _cut(self, synced_N: Tensor) -> list[Tensor]:
        return [fragment.cut(synced_N) for fragment in self.fragments]

    # Windows

    def _begin_windows(self, position: int) -> None:
        """Empty windows, H / fragments apart.

        The first to end is that of the fragment whose turn it is at the position
        (`atoll.optim.log.replay`).
        """
        count = len(self._windows)
        for index, window in enumerate(self._windows):
            turn = (index - position - 1) % count
            window.restart(self.inner_steps - (turn + 1) * self.inner_steps // count)

    def _count(self, tokens: int, loss: float | Tensor | None) -> None:
        tokens = operator.index(tokens)  # a tensor that counts a mask would reach other peers
        loss = loss.detach() if isinstance(loss, Tensor) else loss
        for window in self._windows:
            window.count(tokens, loss)
        stats = self._statistics
        self._statistics = replace(stats, steps=stats.steps + 1, tokens=stats.tokens + tokens)

    def _ended(self) -> list[int]:
        """Fragments to hand in; while an older one is undecided, a window grows."""
        if any(map(self._has_ended, self._windows)) and len(self._windows) > 1:
            self._keep_turns()
        return [i for i, window in enumerate(self._windows) if self._has_ended(window)]

    def _has_ended(self, window: Window) -> bool:
        return window.step_in_window >= self.inner_steps and window.pending is None

    def _keep_turns(self) -> None:
        """Let the window end whose turn it is, if it is another's than the one that has ended.

        Contributions out of turn wait for those before them: without this, fragments of a run that
        advanced without its peers once would all be decided at one time from then on. No window is
        passed over twice in a row, so that each is handed in by a peer that is slow as well.
        """
        if all(window.pending is None for window in self._windows):
            self.reducer.wait()  # returns at once: what the others decided
        ended = {i for i, window in enumerate(self._windows) if self._has_ended(window)}
        turn, count = self._turn(), len(self._windows)
        apart, due = self.inner_steps // count, self._windows[turn]
        longest = self.inner_steps + apart
        passed_over = any(self._windows[index].steps >= longest for index in ended - {turn})
        too_young = due.pending is not None or due.steps < apart
        if not ended or ended == {turn} or passed_over or too_young:
            return
        for ahead in range(count):
            window = self._windows[(turn + ahead) % count]
            window.step_in_window = self.inner_steps - ahead * self.inner_steps // count

    def _turn(self) -> int:
        """Return the fragment that the log moves next, of those that are not on offer."""
        count, undecided = len(self._windows), self._undecided()
        turns = [(self.reducer.position + 1 + ahead) % count for ahead in range(count)]
        return next((turn for turn in turns if turn not in undecided), turns[0])

    def _undecided(self) -> set[int]:
        """Fragments on offer of which no commit has come."""
        on_offer = {i for i, window in enumerate(self._windows) if window.pending is not None}
        return on_offer - {commit.fragment for commit in self._arrived}

    def _overdue(self) -> bool:
        return any(w.pending is not None and w.pending.age >= self.delay for w in self._windows)

    def _report_buffers(self) -> None:
        """Warn, after the first window, of what the model learned without any peer seeing it."""
        watch, self._buffers = self._buffers, None
        if watch is not None and (changed := watch.changed(self.model)):
            _log.warning(
                "training changes the buffers %s, which are not synchronised: each peer keeps its "
                "own, and no checkpoint of the run holds them (docs/library.md)",
                loops.named(changed),
            )

    def _contribution(self, index: int) -> Contribution:
        self._report_buffers()
        window = self._windows[index]
        local_F = self.places.flatten(self.model, index)
        delta = self._delta(index, local_F)
        # A `Difference` is computed later, by whoever asks; it is finite if local is.
        if not self.places.all_of(is_finite(delta if isinstance(delta, Tensor) else local_F)):
            self._discard()
            local_F, delta = self._held(index), torch.zeros(self.fragments[index].numel)
        loss = window.losses.mean()
        number = self._statistics.windows
        self._statistics = replace(self._statistics, windows=number + 1, loss=loss)
        window.pending = PendingWindow(
            # A worker that waits changes nothing meanwhile, and a copy costs 4 bytes a parameter.
            local_N=local_F if self.delay else None,
            tokens=window.tokens,
            steps=window.steps,
        )
        window.step_in_window = 0  # tokens and steps stay until a commit has counted them
        window.losses = LossMean()
        return Contribution(
            fragment=index,
            window=number,
            delta=delta,
            tokens=window.tokens,
            steps=window.steps,
            loss=loss,
            lr=self._rate(),
        )

    def _discard(self) -> None:
        """Drop windows whose result is not finite; what was handed in before stays in local.

        The inner optimizer starts afresh. A contribution of no tokens, thus of weight 0, takes its
        place: no peer has to wait for this one.
        """
        _log.warning(
            "window %d ended in NaN or infinity after %d steps: dropped, back to position %d with "
            "a fresh inner optimizer",
            self._statistics.windows,
            max(window.steps for window in self._windows),
            self._statistics.position,
        )
        sound_N = vectors.empty(self.places.numel)
        stands = zip(self.fragments, self._synced, self._windows, strict=True)
        for fragment, synced_F, window in stands:
            pending = window.pending
            # From synced, a commit would subtract the pending contribution a second time.
            submitted_F = None if pending is None else pending.local_N
            fragment.put_cut_(sound_N, synced_F if submitted_F is None else submitted_F)
        self.places.load_(self.model, sound_N)
        for optimizer in loops.parts_of(self.inner):
            optimizer.state.clear()  # its moments hold NaN as well
        for window in self._windows:
            window.disown()
        self._restart()
        self._statistics = replace(self._statistics, discarded=self._statistics.discarded + 1)

    def _wait(self, contributions: Sequence[Contribution] = ()) -> None:
        """Hand in, deliver what is decided where it is due, and keep the two clocks."""
        before_s = time.perf_counter()
        ended, to_submit = [c.fragment for c in contributions], list(contributions)[::-1]
        del contributions
        for index in ended:
            self.reducer.submit(to_submit.pop())  # and hold it no longer: its vectors are large
            self._handed_in(self.fragments[index])
        # Each wait may decide an older contribution, of another fragment. One that decides nothing
        # has passed its deadline: the peer trains on, and the window grows.
        decided = -1
        while self._overdue() and decided != self._decided:
            decided = self._decided
            self.reducer.wait()
        self._hold_submitted()
        now_s = time.perf_counter()
        self._statistics = replace(
            self._statistics,
            compute_s=self._statistics.compute_s + before_s - self._resumed_s,
            wait_s=self._statistics.wait_s + now_s - before_s,
        )
        self._resumed_s = now_s

    def _hold_submitted(self) -> None:
        """Copy local where a contribution is undecided after a wait: training changes it now."""
        for index, window in enumerate(self._windows):
            if window.pending is not None and window.pending.local_N is None:
                local_F = self.places.flatten(self.model, index)
                window.pending = replace(window.pending, local_N=local_F)

    # Commits

    def _settle(self, commit: Commit) -> None:
        """Take a commit, or keep it until its time has come."""
        self._decided += 1
        self._log_position = max(self._log_position, commit.position)
        if commit.reset:
            # A recovery may lead back to an epoch's base, so the position may fall.
            self._log_position = commit.position
            self._arrived = []
            self._reset(commit)
        elif self._is_early(commit):
            self._arrived.append(commit)
        else:
            self._take(commit)

    def _is_early(self, commit: Commit) -> bool:
        pending = self._windows[commit.fragment].pending
        # Commits of a fragment build on each other: none overtakes one that is still kept.
        kept = any(earlier.fragment == commit.fragment for earlier in self._arrived)
        early = commit.settles and pending is not None and pending.age < self.delay
        return early or kept

    def _take(self, commit: Commit) -> None:
        window = self._windows[commit.fragment]
        new_F = self.fragments[commit.fragment].cut(commit.params_N)
        self._follow(commit, new_F, window)  # needs the pending contribution: close it after
        if commit.settles:
            self._close(commit, window)
        self._synced[commit.fragment] = new_F
        self._statistics = replace(self._statistics, position=commit.position)

    def _reset(self, commit: Commit) -> None:
        self.places.load_(self.model, commit.params_N)
        self._synced = self._cut(commit.params_N)
        self._begin_windows(commit.position)
        self._restart()
        stats = self._statistics
        self._statistics = replace(stats, resets=stats.resets + 1, position=commit.position)

    def _close(self, commit: Commit, window: Window) -> None:
        """Settle my contribution: its work is counted, or remains in the drift."""
        pending, window.pending = window.pending, None
        if pending is None:
            return
        stats = self._statistics
        if commit.counts:
            self._statistics = replace(stats, included=stats.included + 1)
        else:
            self._statistics = replace(stats, left_out=stats.left_out + 1)
        # Any piece counts all of it: a partial inclusion loses no gradient, only the weight of the
        # pieces that are missing.
        if commit.counts or not self.keeps_work:
            window.tokens -= pending.tokens
            window.steps -= pending.steps


def _expect_window(inner_steps: int, delay: int) -> None:
    if inner_steps < 1:
        raise ValueError(f"expected at least one inner step a window, got {inner_steps}")
    if not 0 <= delay <= inner_steps:
        raise ValueError(f"expected a delay of 0 to {inner_steps} inner steps, got {delay}")


def _expect_worker_of(reducer: Reducer, kind: type[Worker]) -> None:
    """Refuse a worker that would send something else than its group reduces."""
    method: Method | None = getattr(reducer, "method", None)
    if method is not None and not issubclass(kind, method.worker_class):
        raise ValueError(
            f"expected a worker of the run's method, {method.spec}, got {kind.__name__}; make it "
            "with reducer.method.worker(model, optimizer, reducer, inner_steps=...)"
        )
