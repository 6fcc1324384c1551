"""The trainer of a peer: draws its data, takes inner steps and lets the method meet the others.

It runs in a thread of its own (`Trainer.run`); everyone else reads `Trainer.statistics`.

The schedule belongs to the run, not to the peer: which step comes after a position of the log, and
how many a window has there, says the run's timetable (`atoll.optim.workers.timetable`), so a peer
that
joins late or slept starts where the others are. Where windows go by a peer's speed, its steps are
larger or smaller strides of the schedule. A peer that waits long for a decision trains on, at a
rate at most two windows ahead.

A loss or gradient that is not finite costs its step. After `MAX_SKIPS` of them in a row the peer's
parameters are taken to be spoiled: it drops its window, goes back to the synced parameters with a
fresh AdamW, and what it would have sent is not sent. After `MAX_DROPPED` such windows in a row it
gives up with `TrainingFailed`.

Random numbers (dropout) follow from the seed, the peer and the step, so they need no saving.

# N parameters
"""

import hashlib
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.reducer import Commit, Reducer
from atoll.optim.state.layout import Layout
from atoll.optim.workers import schedules
from atoll.optim.workers.worker import Worker
from atoll.peer.errors import SavedStateError
from atoll.peer.training import models, saved
from atoll.peer.training.data import load as data
from atoll.peer.training.devices import Device
from atoll.peer.training.learner import Evaluator, Learner
from atoll.peer.training.pace import LONGER, WARM_STEPS, Pace
from atoll.peer.training.statistics import Progress, TrainerStatistics
from atoll.peer.training.watched_reducer import WatchedReducer

MAX_SKIPS = 10  # a bad batch costs one step, spoiled parameters all that follow
MAX_DROPPED = 5  # windows; beyond it the fault is not in this peer's luck
VALID_BATCHES = 16  # 16k tokens of nano: half a second on one core
RATE_STEPS = 32  # steps over which tokens per second are measured
SHARE_STEPS = 9  # steps of whose median a rest is a multiple

_log = logging.getLogger(__name__)


class TrainingFailed(RuntimeError):  # noqa: N818 - it names the event
    """Training cannot go on: every window of this peer ends in numbers that are not finite."""


class _Stopped(Exception):  # noqa: N818
    """Nobody waits for what is being measured."""


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """What a peer decides for itself; none of it changes the run."""

    peer_id: str = "local"
    """Names this peer's stream of data."""
    device: str = "auto"
    """``auto``, ``cuda``, ``cuda:1``, ``mps`` or ``cpu``."""
    position: int = 0
    """Position of the log at which the peer joins; the reducer's parameters stand there."""
    validate_every: int = 0
    """Positions between two measurements of the validation loss; 0 for none."""
    state_path: Path | None = None
    """File in which the trainer keeps its state."""
    save_every_s: float = 300.0
    """Seconds between two saves, each at the end of a window; one more when it stops."""
    share: float = 1.0
    """Of the time to train; after each step the rest is left to other programs."""
    paces_s: Callable[[], Sequence[float]] = tuple
    """Seconds that a step takes each of the other peers, as far as they say."""
    is_over: Callable[[], bool] = lambda: False
    """Whether the run has all its rounds, which a peer in the middle of a window may not know."""
    clock: Callable[[], float] = field(default=time.perf_counter)
    """Seconds from anywhere; measures speed only."""


class Trainer:
    """Trains one model as one peer of a run."""

    def __init__(
        self,
        spec: RunSpec,
        reducer: Reducer,
        options: TrainerOptions | None = None,
        *,
        corpus: data.Corpus | None = None,
        model: nn.Module | None = None,
    ) -> None:
        """Open the data, build the model and take the reducer's parameters.

        Args:
            spec: of the run.
            reducer: what joins the peers; started here.
            options: this peer's own.
            corpus: the data of the run, if it is open already.
            model: the model of the run, if it is built already.

        Raises:
            SetupError: data, model or device are not usable; the subclass says which.
        """
        self.spec, self.options = spec, options or TrainerOptions()
        method = spec.method()
        self.device = Device.choose(self.options.device, spec.inner.precision)
        self.corpus = corpus or open_corpus(spec)
        model = build_model(spec, self.corpus.tokenizer.vocab_size) if model is None else model
        self.timetable = spec.timetable(len(method.fragments(Layout.of(model))))
        self.learner = Learner(
            model,
            spec.inner,
            self.device,
            total_steps=self.timetable.total_steps,
            optimizer=method.inner,
        )
        self._stream = self.corpus.stream(
            seed=spec.run.seed,
            peer_id=self.options.peer_id,
            batch_size=spec.inner.batch_size,
            seq_len=spec.data.seq_len,
        )
        self._reducer = WatchedReducer(reducer, self._committed)
        at = self.options.position
        self._progress = Progress(position=at, seen_position=at)
        self._recent: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS + 1)
        self._steps_s: deque[float] = deque(maxlen=SHARE_STEPS)
        self._pace = Pace()
        self._stopping = threading.Event()
        self._evaluator: Evaluator | None = None
        self._saved_at_s = self.options.clock()
        self._method = method
        self.worker: Worker = method.worker(
            self.learner.model,
            self.learner.optimizer,
            self._reducer,
            inner_steps=self.timetable.window(at),
        )
        self._statistics = TrainerStatistics(
            position=at,
            inner_steps=self.worker.inner_steps,
            params=self.worker.layout.numel,
            device=self.device.label,
            precision=self.device.precision,
        )

    # --- seen from any thread

    def statistics(self) -> TrainerStatistics:
        """How the trainer is; each call returns a consistent record."""
        return self._statistics

    def stop(self) -> None:
        """Let `run` return after the step in progress."""
        self._stopping.set()

    @property
    def finished(self) -> bool:
        """Whether the run has reached its last round."""
        return 0 < self.spec.run.rounds <= self._progress.position

    # --- the trainer's own thread

    def run(self) -> None:
        """Train until the run is finished or `stop` is called; then save, if there is a path.

        Raises:
            TrainingFailed: this peer computes nothing but numbers that are not finite.
            OSError: the state cannot be saved.
        """
        try:
            while not self._stopping.is_set() and not self.finished:
                self.step()
                self._save_when_due()
                if self.options.is_over():
                    self._reducer.wait()  # brings the last round; nothing more is decided
                    self._validate_when_due()
            if self.options.state_path is not None:
                self.save(self.options.state_path)
        finally:
            self._publish(phase="finished" if self.finished else "stopped")

    def step(self) -> None:
        """Take one inner step; at the end of a window also meet the others.

        Raises:
            TrainingFailed: as `run`.
        """
        if self.worker.step_in_window == 0 or self._progress.steps == WARM_STEPS:
            self._look_at_pace()
        self._size_window()
        began_s = self.options.clock()
        torch.manual_seed(self._step_seed())
        inner = self.spec.inner
        batches = [self._stream.next_batch() for _ in range(inner.grad_accumulation)]
        gradient = self.learner.gradient(batches, step=self.schedule_step)
        self._rest(self.options.clock() - began_s)
        self._progress.steps += 1
        self._progress.since_commit += 1
        step_s = self.options.clock() - began_s
        if gradient.is_finite:
            self._take(gradient.loss, sum(batch[:, 1:].numel() for batch in batches))
        else:
            self._skip(gradient.loss, gradient.norm)
        self._measure(step_s)
        self._validate_when_due()

    @property
    def schedule_step(self) -> int:
        """The step of the run that comes next, from 0."""
        own = self.worker.inner_steps
        ahead = min(self._progress.since_commit, 2 * own)
        if self.spec.outer.windows == "deadline":
            ahead = ahead * self.spec.outer.inner_steps // own
        return self.timetable.steps_until(self._progress.position) + ahead

    def evaluate(
        self,
        params_N: Tensor | None = None,
        *,
        batches: int = VALID_BATCHES,
        between: Callable[[], object] = lambda: None,
    ) -> float:
        """Return the loss in nats a token on held-out text.

        Args:
            params_N: parameters, the synced ones by default.
            batches: how many; the text is the same at every call.
            between: called before each; what it raises ends the measurement.

        Raises:
            DataError: a streamed data set has too little validation text.
        """
        if self._evaluator is None or self._evaluator.num_batches != batches:
            self._evaluator = Evaluator(
                self.learner.model, validation(self.spec, self.corpus, batches), self.device
            )
        params_N = self.worker.synced_N if params_N is None else params_N
        return self._evaluator.loss(params_N, between=between)

    def state_dict(self) -> dict[str, Any]:
        """Return all that a restart needs to go on with the same bits."""
        return {
            "peer_id": self.options.peer_id,
            "worker": self.worker.state_dict(),
            "stream": self._stream.state_dict(),
            "progress": vars(self._progress).copy(),
            "valid": [self._statistics.valid_loss, self._statistics.valid_position],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, exact: bool = True) -> None:
        """Go on where `state_dict` was taken.

        Args:
            state: of a trainer of the same run.
            exact: whether the run stands where it stood. If not, only what is this peer's own
                comes back (the moments of AdamW, its place in the data, its counters); the
                parameters stay those that the reducer gave.

        Raises:
            SavedStateError: the state is of another peer or model.
        """
        if state["peer_id"] != self.options.peer_id:
            raise SavedStateError(
                f"expected the state of peer {self.options.peer_id}, got that of "
                f"{state['peer_id']}; use another state directory"
            )
        at = self._progress.position
        here = {"position": at, "seen_position": at, "since_commit": 0}
        before = self._progress
        # First the counters: what was decided meanwhile moves them on while the method loads.
        self._progress = Progress(**(state["progress"] | ({} if exact else here)))
        try:
            if exact:
                self.worker.load_state_dict(state["worker"])
            else:
                self.learner.optimizer.load_state_dict(state["worker"]["inner"])
        except (ValueError, KeyError, RuntimeError, TypeError) as error:
            self._progress = before
            raise SavedStateError(f"the saved state does not fit this model: {error}") from error
        self._stream.load_state_dict(state["stream"])
        valid_loss, valid_position = state["valid"]
        self._recent.clear()
        self._publish(valid_loss=valid_loss, valid_position=valid_position)

    def save(self, path: Path) -> None:
        """Write the state to a file, atomically.

        Raises:
            OSError: the file cannot be written; an older one is still whole.
        """
        saved.save(path, self.state_dict(), kind="trainer", run=self.spec.digest())
        self._saved_at_s = self.options.clock()

    def load(self, path: Path, *, exact: bool = True) -> None:
        """Go on from a file that `save` wrote; see `load_state_dict`.

        Raises:
            SavedStateError: the file is missing, damaged, or of another run, peer or model.
        """
        state = saved.load(path, kind="trainer", run=self.spec.digest())
        self.load_state_dict(state, exact=exact)

    def _step_seed(self) -> int:
        name = f"{self.spec.run.seed}/{self.options.peer_id}/{self._progress.steps}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")

    def _rest(self, step_s: float) -> None:
        """Leave the machine to others for as long as this peer's share of the time asks.

        Of the last steps the median counts: in one of minutes the process or its machine slept.
        """
        self._steps_s.append(step_s)
        if self.options.share < 1.0:
            usual_s = statistics.median(self._steps_s)
            self._stopping.wait(usual_s * (1.0 / self.options.share - 1.0))

    def _look_at_pace(self) -> None:
        busy_s = self.options.clock() - self.worker.statistics().wait_s
        self._pace.look(busy_s, self._progress.steps)

    def _size_window(self) -> None:
        """Take as many steps as the run's rule wants of this peer here."""
        common = self.timetable.window(self.worker.next_position)
        if self.spec.outer.windows != "deadline":
            self.worker.resize(common, delay=self._method.hidden_steps(common))
        elif self.worker.step_in_window == 0 and self._statistics.pace_s > 0:
            paces_s = [self._statistics.pace_s, *self.options.paces_s()]
            own, *_ = schedules.deadline(paces_s, inner_steps=common)
            self.worker.resize(own)

    def _take(self, loss: float, tokens: int) -> None:
        self._progress.skips_in_a_row = 0
        self._progress.tokens += tokens
        self._progress.add_loss(loss)
        self._announce_window_end()
        self.worker.step(tokens=tokens, loss=loss)

    def _skip(self, loss: float, norm: float) -> None:
        self._progress.skipped += 1
        self._progress.skips_in_a_row += 1
        _log.warning("step %d skipped: loss %s, gradient norm %s", self._progress.steps, loss, norm)
        self.learner.clear()
        if self._progress.skips_in_a_row >= MAX_SKIPS and not self._reducer.unsettled:
            self._drop_window()
        else:
            self._announce_window_end()
            self.worker.advance(tokens=0)

    def _drop_window(self) -> None:
        self._progress.skips_in_a_row = 0
        self._progress.dropped += 1
        self._progress.dropped_in_a_row += 1
        if self._progress.dropped_in_a_row >= MAX_DROPPED:
            raise TrainingFailed(
                f"{MAX_DROPPED} windows in a row ended in {MAX_SKIPS} steps without a finite loss "
                f"and gradient, the last one after position {self._progress.position}; check the "
                "data of this peer and the learning rate of the run"
            )
        _log.warning("window dropped after %d bad steps in a row", MAX_SKIPS)
        self._reducer.go_back(self._progress.position, self.worker.synced_N)
        self.learner.optimizer.state.clear()

    def _committed(self, commit: Commit) -> None:
        if commit.reset:
            self._progress.since_commit = 0
        elif commit.position != self._progress.position:
            self._progress.since_commit = self.worker.steps_since(commit)
        self._progress.position = commit.position
        if commit.included is not None:
            self._progress.dropped_in_a_row = 0

    def _announce_window_end(self) -> None:
        last = self.worker.steps_left == 1
        self._publish(phase="reducing" if last else "training")

    def _validate_when_due(self) -> None:
        every, before = self.options.validate_every, self._progress.seen_position
        self._progress.seen_position = self._progress.position
        if not every or self._progress.position == before:
            return
        if self._progress.position // every > before // every or self.finished:
            self._publish(phase="validating")
            try:
                loss = self.evaluate(between=self._expect_no_stop)
            except _Stopped:
                self._progress.seen_position = before  # who goes on from here measures it then
            else:
                self._publish(valid_loss=loss, valid_position=self._progress.position)

    def _expect_no_stop(self) -> None:
        """The last measurement of a run is waited for; any other ends with the trainer."""
        if self._stopping.is_set() and not self.finished:
            raise _Stopped

    def _save_when_due(self) -> None:
        path, at_window_end = self.options.state_path, self.worker.step_in_window == 0
        due = self.options.clock() - self._saved_at_s >= self.options.save_every_s
        if path is not None and at_window_end and due:
            self.save(path)

    def _measure(self, step_s: float) -> None:
        self._recent.append((self.options.clock(), self._progress.tokens))
        (first_s, first), (last_s, last) = self._recent[0], self._recent[-1]
        if self._progress.steps > 2:  # the first step is slow: caches, kernels, compilation
            usual_s = self._statistics.step_s or step_s
            step_s = 0.9 * usual_s + 0.1 * min(step_s, LONGER * usual_s)
        left = self.worker.steps_left
        self._publish(
            phase="training",
            tokens_per_s=(last - first) / (last_s - first_s) if last_s > first_s else 0.0,
            step_s=step_s,
            pace_s=self._pace.step_s or (step_s if self._progress.steps > WARM_STEPS else 0.0),
            ready_in_s=left * step_s,
            learning_rate=self.learner.optimizer.param_groups[0]["lr"],
        )

    def _publish(self, **changes: Any) -> None:  # noqa: ANN401 - fields of TrainerStatistics
        """Replace the record; a reader sees the old one or the new one, nothing in between."""
        method = self.worker.statistics()
        changes.setdefault("phase", self._statistics.phase)
        self._statistics = replace(
            self._statistics,
            position=self._progress.position,
            step=self.worker.step_in_window,
            inner_steps=self.worker.inner_steps,
            schedule_step=self.schedule_step,
            steps=self._progress.steps,
            tokens=self._progress.tokens,
            loss=self._progress.loss,
            compute_s=method.compute_s,
            wait_s=method.wait_s,
            windows=method.windows,
            skipped_steps=self._progress.skipped,
            dropped_windows=self._progress.dropped + method.discarded,
            **changes,
        )


def open_corpus(spec: RunSpec) -> data.Corpus:
    """Open the data that a spec names.

    Raises:
        DataError: as `atoll.peer.training.data.load.open_corpus`.
    """
    section = spec.data
    return data.open_corpus(
        section.source,
        format=section.format,
        tokenizer=section.tokenizer,
        text_field=section.text_field,
        valid_fraction=section.valid_fraction,
        seq_len=section.seq_len,
    )


def build_model(spec: RunSpec, vocab_size: int) -> nn.Module:
    """Build the model that a spec names, on the CPU, with the weights of its seed.

    Args:
        spec: of the run.
        vocab_size: of the run's tokenizer.

    Raises:
        ModelError: as `atoll.peer.training.models.build`.
    """
    return models.build(
        spec.model.preset,
        custom=spec.model.custom,
        overrides=spec.model.overrides,
        vocab_size=vocab_size,
        seq_len=spec.data.seq_len,
        seed=spec.run.seed,
    )


def validation(spec: RunSpec, corpus: data.Corpus, batches: int = VALID_BATCHES) -> list[Tensor]:
    """Return the fixed validation batches of a run, int64 ``(B, T + 1)`` each."""
    return corpus.validation(
        batches=batches, batch_size=spec.inner.batch_size, seq_len=spec.data.seq_len
    )
