"""DiLoCo in the user's own loop: train alone for a window, then meet the others.

    synced   parameters that every replica holds in the same bits
    local    what this peer trains: the model's own tensors
    drift    synced - local; at the end of a window it is the pseudo-gradient delta

Each commit moves local, and counts a contribution once:

    cells with my contribution   local = synced_new + (local - local at submission)
    all other cells              local += synced_new - synced_old
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from atoll.optim.layout import Layout, LayoutError, cell_slices
from atoll.optim.reducer import Commit, Contribution, Reducer
from atoll.optim.state import is_finite

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DiLoCoStatistics:
    """How a peer's training is going."""

    position: int = 0
    """Position of the log that synced stands at."""

    steps: int = 0
    """Inner steps done."""

    tokens: int = 0
    """Tokens trained on."""

    windows: int = 0
    """Windows ended."""

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


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """My contribution under way: where local stood, and the work that it stands for."""

    local_N: Tensor  # noqa: N815
    tokens: int
    steps: int


class DiLoCo:
    """DiLoCo (arXiv:2311.08105): inner steps by any optimizer, outer steps by the reducer.

    Departures: the outer optimizer lives with the log, so that all replicas apply the same
    bytes; a peer whose contribution is left out trains on and contributes both windows at once.
    """

    def __init__(
        self, model: nn.Module, inner: torch.optim.Optimizer, reducer: Reducer, *, inner_steps: int
    ) -> None:
        """Join the reducer and take its parameters.

        Args:
            model: any module; its trainable parameters sync, its buffers do not.
            inner: optimizer over these parameters; its state persists over windows.
            reducer: an `InProcessGroup` member, or the networked one.
            inner_steps: H, steps of a window; may be set again at any time.

        Raises:
            ValueError: when inner_steps is below 1.
            LayoutError: when the model has no trainable floating point parameters.
        """
        if inner_steps < 1:
            raise ValueError(f"expected at least one inner step a window, got {inner_steps}")
        self.model = model
        self.inner = inner
        self.reducer = reducer
        self.inner_steps = inner_steps
        self.layout = Layout.of(model)
        self._statistics = DiLoCoStatistics()
        self._pending: _Pending | None = None
        self._tokens = self._steps = self._step_in_window = 0
        self._losses: list[float | Tensor] = []
        self._synced_N = reducer.start(self.layout, self.layout.flatten(model), self._settle)
        self.layout.load_(model, self._synced_N)
        self._resumed_s = time.perf_counter()

    @property
    def synced_N(self) -> Tensor:  # noqa: N802
        """The parameters that all replicas share, fp32 on the CPU. Read only."""
        return self._synced_N

    @property
    def step_in_window(self) -> int:
        """Inner steps done since the last window ended."""
        return self._step_in_window

    def statistics(self) -> DiLoCoStatistics:
        """How training is going."""
        return self._statistics

    def step(self, *, tokens: int, loss: float | Tensor | None = None) -> None:
        """Do an inner step, in place of `inner.step()`; at the end of a window, meet the others.

        Args:
            tokens: tokens (or samples) that the gradients come from; they weigh this peer.
            loss: the step's loss, for the log of the run.
        """
        self.inner.step()
        self.advance(tokens=tokens, loss=loss)

    def advance(self, *, tokens: int, loss: float | Tensor | None = None) -> None:
        """What `step` does after `inner.step()`, for loops that call that one themselves.

        A step that was skipped, as by a gradient scaler, is passed with 0 tokens.
        """
        self._count(tokens, loss)
        if self._step_in_window >= self.inner_steps:
            self._end_window()
        elif self._pending is not None:
            self._wait()

    def state_dict(self) -> dict[str, Any]:
        """Everything, at any step: model, inner optimizer, reducer and the open window.

        Loading it and going on gives the same bits as not stopping. Random number generators
        and the place in the data are the caller's.
        """
        return {
            "layout": self.layout.to_json(),
            "model": self.model.state_dict(),
            "inner": self.inner.state_dict(),
            "reducer": self.reducer.state_dict(),
            "synced_N": self._synced_N,
            "pending": None if self._pending is None else vars(self._pending).copy(),
            "inner_steps": self.inner_steps,
            "step_in_window": self._step_in_window,
            "tokens": self._tokens,
            "steps": self._steps,
            "losses": [float(loss) for loss in self._losses],
            "statistics": vars(self._statistics).copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            LayoutError: when it was taken of another model.
        """
        if Layout.from_json(state["layout"]) != self.layout:
            raise LayoutError("expected the state of this model, got that of another layout")
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])
        self._synced_N = state["synced_N"].clone()
        pending = state["pending"]
        self._pending = None if pending is None else _Pending(**pending)
        self.inner_steps = state["inner_steps"]
        self._step_in_window = state["step_in_window"]
        self._tokens, self._steps = state["tokens"], state["steps"]
        self._losses = list(state["losses"])
        self._statistics = DiLoCoStatistics(**state["statistics"])
        self.reducer.load_state_dict(state["reducer"])
        self._resumed_s = time.perf_counter()

    def _count(self, tokens: int, loss: float | Tensor | None) -> None:
        self._tokens += tokens
        self._steps += 1
        self._step_in_window += 1
        if loss is not None:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        stats = self._statistics
        self._statistics = replace(stats, steps=stats.steps + 1, tokens=stats.tokens + tokens)

    def _end_window(self) -> None:
        if self._pending is not None:
            self._wait()
        if self._pending is not None:
            return  # undecided still: the window grows until it is
        contribution = self._contribution()
        self._step_in_window = 0
        self._losses = []
        self._wait(contribution)

    def _contribution(self) -> Contribution:
        local_N = self.layout.flatten(self.model)
        delta_N = self._synced_N - local_N
        if not is_finite(delta_N):
            self._discard()
            local_N, delta_N = self._synced_N, torch.zeros_like(delta_N)
        loss = sum(map(float, self._losses)) / len(self._losses) if self._losses else float("nan")
        window = self._statistics.windows
        self._statistics = replace(self._statistics, windows=window + 1, loss=loss)
        self._pending = _Pending(local_N=local_N, tokens=self._tokens, steps=self._steps)
        return Contribution(
            window=window, delta_N=delta_N, tokens=self._tokens, steps=self._steps, loss=loss
        )

    def _discard(self) -> None:
        """Drop a window whose result is not finite.

        Its moments hold NaN as well, so the inner optimizer starts afresh. A contribution of no
        tokens, thus of weight 0, takes its place: nobody has to wait for this peer.
        """
        _log.warning(
            "window %d ended in NaN or infinity after %d steps: dropped, back to position %d with "
            "a fresh inner optimizer",
            self._statistics.windows,
            self._steps,
            self._statistics.position,
        )
        self.layout.load_(self.model, self._synced_N)
        self.inner.state.clear()
        self._tokens = 0
        self._statistics = replace(self._statistics, discarded=self._statistics.discarded + 1)

    def _wait(self, contribution: Contribution | None = None) -> None:
        """Hand in, deliver what is decided, and keep the two clocks."""
        before_s = time.perf_counter()
        if contribution is not None:
            self.reducer.submit(contribution)
        self.reducer.wait()
        now_s = time.perf_counter()
        self._statistics = replace(
            self._statistics,
            compute_s=self._statistics.compute_s + before_s - self._resumed_s,
            wait_s=self._statistics.wait_s + now_s - before_s,
        )
        self._resumed_s = now_s

    def _settle(self, commit: Commit) -> None:
        if commit.reset:
            self._reset(commit)
        else:
            self._rebase(commit)
            if commit.settles:
                self._close(commit)
        self._synced_N = commit.params_N
        self._statistics = replace(self._statistics, position=commit.position)

    def _reset(self, commit: Commit) -> None:
        self.layout.load_(self.model, commit.params_N)
        self._pending = None
        self._tokens = self._steps = self._step_in_window = 0
        self._losses = []
        self._statistics = replace(self._statistics, resets=self._statistics.resets + 1)

    def _rebase(self, commit: Commit) -> None:
        """Move local by the two rules at the top of this module."""
        included = [False] * self.layout.num_cells
        if commit.included is not None:
            included = commit.included.tolist()
        pending_N = None if self._pending is None else self._pending.local_N.clone()
        local_N = self.layout.flatten(self.model)
        for cell, mine in zip(cell_slices(local_N.numel()), included, strict=True):
            new, old, local = commit.params_N[cell], self._synced_N[cell], local_N[cell]
            if mine and pending_N is not None:
                local.copy_(new + (local - pending_N[cell]))
                continue
            local += new - old
            if pending_N is not None:
                pending_N[cell] += new - old
        self.layout.load_(self.model, local_N)
        if self._pending is not None and pending_N is not None:
            self._pending = replace(self._pending, local_N=pending_N)

    def _close(self, commit: Commit) -> None:
        """Settle my contribution: its work is counted, or remains in the drift."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        stats = self._statistics
        if commit.included is None or not bool(commit.included.any()):
            self._statistics = replace(stats, left_out=stats.left_out + 1)
            return
        self._tokens -= pending.tokens
        self._steps -= pending.steps
        self._statistics = replace(stats, included=stats.included + 1)
