"""The training loop of a peer: draws data, takes inner steps and runs the method's outer steps.

`Trainer.run` runs in its own thread; other threads read `Trainer.statistics`.

The learning-rate schedule belongs to the run, not to the peer. The run's timetable
(`atoll.optim.schedules`) maps a position of the log to its step count and window length, so
a peer that joins late or was suspended starts at the same step as the others. If windows are sized
by speed, a peer's steps are larger or smaller strides of the schedule. A peer that waits long for a
commit continues training, at a learning rate at most two windows ahead.

A step is skipped if its loss or gradient is not finite. After `MAX_SKIPS` such steps in a row the
peer assumes that its parameters are corrupted: it drops the window without contributing it and
restarts from the synced parameters with a fresh inner optimizer. After `MAX_DROPPED` such windows
in a row it raises `TrainingFailed`.

Random numbers (dropout) follow from the seed, the peer and the step, so their state is not saved.

# N parameters
"""

import hashlib
import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from atoll.coordinator.run.spec import RunSpec
from atoll.optim import schedules
from atoll.optim.methods.base import Method
from atoll.optim.methods.worker import Worker, WorkerStatistics
from atoll.optim.ranks import RanksError
from atoll.optim.reducer import Commit, Course, Reducer
from atoll.optim.state import vectors
from atoll.optim.state.layout import Layout, LayoutError
from atoll.peer.errors import DataError, SavedStateError
from atoll.peer.pipeline.workbench import Workbench
from atoll.peer.training.beside import BesideWaits
from atoll.peer.training.data import load as data
from atoll.peer.training.data.prefetch import Prefetched
from atoll.peer.training.data.remarks import Remark, remarks
from atoll.peer.training.data.units import UnitStream
from atoll.peer.training.devices import Device
from atoll.peer.training.learner import Evaluator, Learner, StartSmaller
from atoll.peer.training.opening import (
    VALID_BATCHES,
    build_model,
    build_stage,
    open_corpus,
    open_tokenizer,
    separate_documents,
    try_model,
    validation,
)
from atoll.peer.training.permission import Allowed, by_contents
from atoll.peer.training.rank_fits import RankFits
from atoll.peer.training.ranks import OneRank, held_out_loss
from atoll.peer.training.saves import Saves
from atoll.peer.training.shards import Saver
from atoll.peer.training.stage_compute import expect_runs as expect_stage_runs
from atoll.peer.training.stage_learner import StageLearner, StoppedInStep, codecs_of
from atoll.peer.training.stages import StageModel
from atoll.peer.training.statistics import (
    LONGER,
    WARM_STEPS,
    StepPace,
    TimeInRun,
    TimeSpent,
    TrainerCounters,
    TrainerPhase,
    TrainerStatistics,
)
from atoll.peer.training.watched import WatchedReducer
from atoll.peer.training.windows import Windows

MAX_SKIPS = 10  # a bad batch costs one step; corrupted parameters cost every step that follows
MAX_DROPPED = 5  # windows; so many in a row are a fault of the data or the settings, not bad luck
IDLE_S = 0.2  # between looks for a decision, where a step would have taken the time
RATE_STEPS = 32  # over which tokens per second are measured, waits included
SHARE_STEPS = 9  # recent steps; a rest is a multiple of their median

_log = logging.getLogger(__name__)


class TrainingFailed(RuntimeError):
    """Training cannot continue: every window of this peer ends in non-finite numbers."""


class _Stopped(Exception):
    """The trainer was stopped during a validation."""


@dataclass(frozen=True, kw_only=True)
class StageSeat:
    """The stage that a peer serves in a pipeline, as its trainer needs it."""

    module: str
    """The module's name in the run."""
    bench: Workbench
    """The jobs that the pipeline has for this stage."""
    is_complete: Callable[[], bool] = lambda: True
    """Returns whether all stages of the run are done."""


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """Options of one peer; none of them changes the run."""

    peer_id: str = "local"
    """Name of this peer; selects its stream of data."""
    device: str = "auto"
    """`auto`, `cuda`, `cuda:1`, `mps` or `cpu`."""
    position: int = 0
    """Position of the log at which the peer joins: that of the reducer's parameters."""
    validate_every: int = 0
    """Positions between measurements of the validation loss; 0 for none."""
    validate_share: float = 1.0
    """Fraction of the time that validation may take; the last one of a run is always done."""
    validates: Callable[[int], bool] = lambda position: True
    """Returns whether it is this peer's turn to validate a position of the log."""
    state_path: Path | None = None
    """File of the trainer's state; None to save nothing."""
    save_every_s: float = 300.0
    """Seconds between saves, which happen at the end of a window; stopping saves as well. Longer
    where that would take more than `saves.SAVE_SHARE` of the time."""
    allowed: Allowed = field(default_factory=Allowed)
    """Code and files beyond the built-in ones that this machine's owner lets the spec use."""
    share: float = 1.0
    """Fraction of time to spend training; the trainer sleeps for the rest after each step."""
    paces_s: Callable[[], Sequence[float]] = tuple
    """Returns the seconds per step that other peers report."""
    window_ends: Callable[[], Sequence[schedules.WindowEnd]] = tuple
    """Returns when the windows of other peers at this position end."""
    joins: Callable[[], bool] = lambda: False
    """Returns whether the open window counts nothing, as the first one after joining."""
    is_over: Callable[[], bool] = lambda: False
    """Returns whether the run is complete, which a peer within a window may not know yet."""
    ranks: OneRank = field(default_factory=OneRank)
    """The processes that train as this peer; all have the same options but for what is called."""
    stage: StageSeat | None = None
    """The stage of a pipeline that this peer serves; None trains the whole model."""
    clock: Callable[[], float] = field(default=time.perf_counter)
    """Returns seconds from any origin; used only to measure speed."""


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
        is_tried: bool = False,
    ) -> None:
        """Open the data, build the model and take the reducer's parameters.

        Args:
            spec: the spec of the run.
            reducer: the connection to the other peers; started here.
            options: options of this peer.
            corpus: the data of the run, if already open.
            model: the model of the run, if already built.
            is_tried: whether a custom model has already computed a gradient on its device.

        Raises:
            SetupError: the data, model or device is not usable; the subclass tells which.
        """
        self.spec, self.options = spec, options or TrainerOptions()
        method = spec.method()
        self.device = Device.choose(self.options.device, spec.inner.precision)
        self._ranks = self.options.ranks
        self._name = self._ranks.own_name(self.options.peer_id)
        self._stopping = threading.Event()
        self._held_out: list[Tensor] = []
        """validation microbatches of a first stage, once they were drawn"""
        self._held_out_next = 0
        self.corpus = corpus or self._opened_corpus()
        if model is None:
            model = self._build()
        self.timetable = spec.timetable(len(method.fragments(Layout.of(model))))
        self._stream = self._opened_stream()
        self.learner = self._learner_of(model, method, is_tried=is_tried)
        self._reducer = WatchedReducer(
            reducer,
            self._committed,
            beside=self._beside(),
            done_units=self._stream.held.hand_in if isinstance(self._stream, UnitStream) else None,
        )
        at = self.options.position
        self._progress = TrainerCounters(position=at, seen_position=at)
        self._recent: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS + 1)
        self._steps_s: deque[float] = deque(maxlen=SHARE_STEPS)
        self._pace = StepPace()
        self._steps_here = 0
        """steps of this process, whose first ones are slow, also after a restart"""
        self._times = TimeInRun()
        self._room = vectors.OnceAWindow()
        self._began_s: float | None = None
        self._before = WorkerStatistics()
        """of the worker when this process began: it resumes with those of earlier ones"""
        self._train_s = self._pause_s = self._validate_s = 0.0
        self._validate_from_s = -math.inf
        self._saves = Saves(
            self.options.state_path,
            self._saver,
            self.state_dict,
            ranks=self._ranks,
            every_s=self.options.save_every_s,
            clock=self.options.clock,
        )
        self._fits = RankFits(
            self.options.state_path, self._ranks, device=self.device.label, run=self._saved_run
        )
        self._evaluator: Evaluator | None = None
        self.worker: Worker = method.worker(
            self.learner.model,
            self.learner.optimizer,
            self._reducer,
            inner_steps=self.timetable.window(at),
        )
        self.worker.make_room = self._make_room
        self._windows = Windows(
            spec,
            self.worker,
            method,
            ranks=self._ranks,
            statistics=self.statistics,
            paces_s=self.options.paces_s,
            window_ends=self.options.window_ends,
            joins=self.options.joins,
        )
        # The run may have moved on, or ended, since this peer joined; no commit tells it then.
        self._progress.position = max(at, self._reducer.position)
        self._statistics = TrainerStatistics(
            position=at,
            inner_steps=self.worker.inner_steps,
            params=self.worker.layout.numel,
            device=self.device.label
            if self._ranks.size == 1
            else f"{self._ranks.size} x {self.device.label}",
            precision=self.device.precision,
        )

    def _opened_corpus(self) -> data.Corpus | None:
        """Return the run's text; None at a stage that draws none."""
        seat = self.options.stage
        if seat is not None and seat.module != self.spec.modules[0]:
            return None
        return open_corpus(self.spec, self.options.allowed)

    def _build(self) -> nn.Module:
        """Build the run's model, or this peer's stage of it, on the CPU."""
        spec, allowed, seat = self.spec, self.options.allowed, self.options.stage
        tokenizer = self.corpus.tokenizer if self.corpus else open_tokenizer(spec, allowed)
        if seat is None:
            return build_model(spec, tokenizer.vocab_size, allowed)
        return build_stage(spec, seat.module, tokenizer.vocab_size, allowed)

    def _opened_stream(self) -> Prefetched | UnitStream | None:
        """Return this peer's training data; None at a stage that draws none."""
        if self.corpus is None:
            return None
        if self.spec.data.once:
            if self._ranks.size > 1:
                raise DataError(
                    "data.once: the ranks of one peer cannot share its units; start a peer for "
                    "each GPU"
                )
            return UnitStream(self.spec, self.corpus)
        return Prefetched(
            self.corpus.stream(
                seed=self.spec.run.seed,
                peer_id=self._name,
                batch_size=self.spec.inner.batch_size,
                seq_len=self.spec.data.seq_len,
            )
        )

    def _learner_of(
        self, model: nn.Module, method: Method, *, is_tried: bool
    ) -> Learner | StageLearner:
        """Move the model to the device, with its inner optimizer, and try it there."""
        spec, total_steps = self.spec, self.timetable.total_steps
        if isinstance(model, StageModel):
            assert self.options.stage is not None
            learner = StageLearner(
                model,
                spec.inner,
                self.device,
                self.options.stage.bench,
                codecs_of(spec),
                draw=self._draw if model.is_first else None,
                total_steps=total_steps,
                optimizer=method.inner,
                is_stopped=lambda: self._stopping.is_set() or self.options.is_over(),
            )
            expect_stage_runs(spec.model.title, learner.compute, sequences=spec.inner.batch_size)
            return learner
        assert self.corpus is not None  # a whole model needs text
        separate_documents(spec, model, self.corpus.tokenizer)
        whole = Learner(
            model,
            spec.inner,
            self.device,
            total_steps=total_steps,
            optimizer=method.inner,
            ranks=self._ranks,
        )
        if not is_tried:
            vocab_size = self.corpus.tokenizer.vocab_size
            try_model(spec, model, self.device, vocab_size=vocab_size)
        return whole

    def _beside(self) -> BesideWaits | None:
        """Return what a stage computes while it waits for a round; None if it has to stand still.

        Without staleness, a microbatch needs the same parameters in both of its passes.
        """
        may = self.spec.topology.staleness > 0 and self.options.share == 1.0
        if not may or not isinstance(self.learner, StageLearner):
            return None
        return BesideWaits(self.learner.compute_beside)

    # --- callable from any thread

    def statistics(self) -> TrainerStatistics:
        """Return the latest statistics, as one consistent record."""
        return self._statistics

    def remarks(self) -> list[Remark]:
        """Return what the owner should know of the text, each with its level."""
        if self.corpus is None:
            return []
        rounds, at = self.spec.run.rounds, self.options.position
        left = self.timetable.total_steps - self.timetable.steps_until(at) if rounds else None
        return list(remarks(self.spec, self.corpus, steps_left=left))

    def stop(self) -> None:
        """Make `run` return after the step in progress."""
        self._stopping.set()

    @property
    def finished(self) -> bool:
        """Return whether the run has reached its last round."""
        return 0 < self.rounds <= self._progress.position

    @property
    def rounds(self) -> int:
        """The round after which the run ends, as far as this trainer knows; 0 for none."""
        return self.course.rounds(self.spec.run.rounds)

    @property
    def course(self) -> Course:
        """Return the course of training at this trainer's position."""
        return self._reducer.course

    # --- the trainer's own thread

    def run(self) -> None:
        """Train until the run is finished or `stop` is called; then save, if there is a path.

        Raises:
            TrainingFailed: `MAX_DROPPED` windows in a row ended in non-finite numbers.
            DeviceError: the device does not hold a single sequence.
            OSError: the state cannot be saved.
        """
        self.device.activate()
        if isinstance(self.learner, Learner):
            self.learner.use(self._fits.least(self.learner.fit, self.spec.inner.batch_size))
        try:
            while not self._ranks.agreed(self._stopping.is_set()) and not self.finished:
                with suppress(StoppedInStep):
                    self.step()
                    self._saves.when_due(at_window_end=self.worker.step_in_window == 0)
                if self._ranks.agreed(self.options.is_over()):
                    self._reducer.wait()  # delivers the last round; no other follows
                    self._validate_when_due()
            if self.options.state_path is not None:
                self.save(self.options.state_path)
            self._serve_others()
        finally:
            if self._stream is not None:
                self._stream.close()
            self._saves.close()
            self._reducer.close()
            self._publish(phase=TrainerPhase.FINISHED if self.finished else TrainerPhase.STOPPED)

    def step(self) -> None:
        """Take one inner step and, at the end of a window, the method's outer step.

        Raises:
            TrainingFailed: `MAX_DROPPED` windows in a row ended in non-finite numbers.
        """
        if self._began_s is None:
            self._began_s, self._before = self.options.clock(), self.worker.statistics()
        if self.worker.step_in_window == 0 or self._steps_here == WARM_STEPS:
            busy_s = self.options.clock() - self.worker.statistics().wait_s
            self._pace.measure(busy_s, self._steps_here)
        self._windows.size(self.timetable.window(self.worker.next_position), self.course)
        if isinstance(self._stream, UnitStream) and self._stream.held.is_empty:
            self._pass_step()
            return
        self.learner.scale = self.course.inner_scale
        # Dropout of this step follows from its name, so a restart repeats it.
        name = f"{self.spec.run.seed}/{self._name}/{self._progress.steps}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        batches = self._batches()
        began_s, apart_s = self.options.clock(), self._apart_s()
        if isinstance(self.learner, StageLearner):
            gradient = self.learner.gradient(step=self.schedule_step)
        else:
            try:
                gradient = self.learner.gradient(batches, step=self.schedule_step, seed=seed)
            except StartSmaller as smaller:
                self._fits.remember(smaller.fit)
                raise
        paused_s = self._rest(self.options.clock() - began_s)
        self._progress.steps += 1
        self._steps_here += 1
        self._progress.since_commit += 1
        step_s = self.options.clock() - began_s
        if gradient.is_finite:
            self._take(gradient.loss, gradient.tokens)
        else:
            self._skip(gradient.loss, gradient.norm)
        took_s = self.options.clock() - began_s - paused_s - (self._apart_s() - apart_s)
        self._train_s += max(0.0, took_s)
        self._pause_s += paused_s
        self._measure(step_s)
        self._validate_when_due()

    def _pass_step(self) -> None:
        """Pass a step without a row: this peer holds no unit of them, or none any more.

        The contribution of such steps weighs nothing, and the entry with it brings units.
        """
        assert isinstance(self._stream, UnitStream)
        if self._reducer.unsettled:
            self._reducer.wait()  # it may bring units for the rest of the window
            if self._reducer.unsettled:
                self._stopping.wait(IDLE_S)
        if self._stream.held.is_empty:
            # As long as a step: others that still train would else miss many short rounds. But the
            # first steps are slow: as long as those, no window would end before the others' rounds,
            # and who is in none of these gets no units, hence never takes a faster step.
            step_s = self._statistics.pace_s or min(
                self.options.paces_s(), default=self._statistics.step_s
            )
            ready_at_s = time.monotonic() + self.worker.steps_left * step_s
            self._publish(phase=TrainerPhase.REDUCING, ready_at_s=ready_at_s)
            self._stopping.wait(step_s)
            self.worker.advance(tokens=0)
        self._validate_when_due()

    def _batches(self) -> list[Tensor]:
        """Draw the batches of a step; a stage's come one by one, as the pipeline takes them."""
        if self._stream is None or isinstance(self.learner, StageLearner):
            return []
        if isinstance(self._stream, UnitStream):
            return self._stream.next_batches()
        return [self._stream.next_batch() for _ in range(self.spec.inner.grad_accumulation)]

    def _draw(self, *, trains: bool) -> Tensor:
        """Draw a microbatch at the first stage of a pipeline."""
        assert isinstance(self._stream, Prefetched) and self.corpus is not None
        if trains:
            return self._stream.next_batch()
        if not self._held_out:
            self._held_out = validation(self.spec, self.corpus)
        self._held_out_next += 1
        return self._held_out[self._held_out_next % len(self._held_out)]

    def _serve_others(self) -> None:
        """Compute for the other stages until the run is complete, or this peer is stopped."""
        seat = self.options.stage
        if seat is None or not isinstance(self.learner, StageLearner):
            return
        while not self._stopping.is_set() and self.finished and not seat.is_complete():
            self.learner.serve()

    def _apart_s(self) -> float:
        """Seconds that the worker has spent on other things than steps."""
        stats = self.worker.statistics()
        return stats.wait_s + stats.outer_s + self._starved_s()

    def _starved_s(self) -> float:
        """Seconds that a stage had nothing to compute, less those that it used while it waited."""
        learner = self.learner
        return learner.waited_s - learner.beside_s if isinstance(learner, StageLearner) else 0.0

    def time_spent(self) -> TimeSpent:
        """Return what this process has spent so far, from its first step on."""
        stats, now_s = self.worker.statistics(), self.options.clock()
        return TimeSpent(
            total_s=now_s - self._began_s if self._began_s is not None else 0.0,
            train_s=self._train_s,
            pause_s=self._pause_s,
            outer_s=stats.outer_s - self._before.outer_s,
            wait_s=stats.wait_s - self._before.wait_s + self._starved_s(),
            validate_s=self._validate_s,
            save_s=self._saves.took_s,
        )

    @property
    def schedule_step(self) -> int:
        """Index of the next step on the run's schedule, from 0."""
        own, at = self.worker.inner_steps, self._progress.position
        # A peer that waits for a commit must not run through the run's schedule alone.
        ahead = min(self._progress.since_commit, 2 * own)
        if self.spec.outer.windows == "deadline" or self.course.inner_steps is not None:
            # The rate follows the run's rounds, whatever steps they have now.
            ahead = ahead * self.timetable.window(at) // own
        return self.timetable.steps_until(at) + ahead

    def evaluate(
        self,
        params_N: Tensor | None = None,
        *,
        batches: int = VALID_BATCHES,
        between: Callable[[], object] = lambda: None,
    ) -> float:
        """Return the loss on held-out text in nats per token.

        The first stage of a pipeline sends the text through all of them, whose present parameters
        it measures.

        Args:
            params_N: parameters to evaluate; the synced ones by default, and with several ranks.
            batches: number of batches; the text is the same at every call.
            between: called before each batch; an exception from it ends the measurement.

        Raises:
            DataError: a streamed data set has too little validation text.
        """
        if isinstance(self.learner, StageLearner):
            return self.learner.evaluate(batches)
        assert self.corpus is not None  # a whole model needs text
        if self._ranks.size > 1:
            texts = validation(self.spec, self.corpus, batches)
            return held_out_loss(
                self.worker,
                self.device,
                texts,
                self._ranks,
                sequences=self.learner.fit.sequences,
                between=between,
            )
        if self._evaluator is None or self._evaluator.num_batches != batches:
            self._evaluator = Evaluator(
                self.learner.model,
                validation(self.spec, self.corpus, batches),
                self.device,
                fit=lambda: self.learner.fit,
            )
        params_N = self.worker.synced_N if params_N is None else params_N
        return self._evaluator.loss(params_N, between=between)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a restart needs to resume with the same bits; a rank's share of it.

        Frozen parameters are left out: they are the model's from the beginning.
        """
        worker = self.worker.share_dict()
        named = self.learner.model.named_parameters(remove_duplicate=False)
        frozen = {name for name, param in named if not param.requires_grad}
        worker["model"] = {k: v for k, v in worker["model"].items() if k not in frozen}
        stream = self._stream.state_dict() if self._stream is not None else {}
        streams = self._ranks.gathered(stream)
        return {
            "peer_id": self.options.peer_id,
            "worker": worker,
            "learner": self.learner.state_dict(),
            "stream": streams[0] if len(streams) == 1 else {"ranks": streams},
            "progress": vars(self._progress).copy(),
            "valid": [self._statistics.valid_loss, self._statistics.valid_position],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, exact: bool = True) -> None:
        """Resume from a state that `state_dict` returned.

        Args:
            state: the state of a trainer of the same run, as `Places.shared` gives it to all ranks.
            exact: whether the run is still at the position of the state. If not, restore only this
                peer's own part (inner optimizer, position in the data, counters) and keep the
                reducer's parameters.

        Raises:
            SavedStateError: the state belongs to another peer or model.
            RanksError: a rank was lost meanwhile.
        """
        if state["peer_id"] != self.options.peer_id:
            raise SavedStateError(
                f"expected the state of peer {self.options.peer_id}, got that of "
                f"{state['peer_id']}; use another state directory"
            )
        at = self._progress.position
        here = {"position": at, "seen_position": at, "since_commit": 0}
        before = self._progress
        # The counters come first: loading the method delivers later commits, which advance them.
        self._progress = TrainerCounters(**(state["progress"] | ({} if exact else here)))
        if isinstance(self._stream, UnitStream) and exact:  # likewise
            self._stream.load_state_dict(state["stream"])
        try:
            if exact:
                self.worker.load_shared(state["worker"])
            else:
                self.worker.places.load_optimizer(self.learner.optimizer, state["worker"]["inner"])
        except RanksError:
            raise
        except (ValueError, KeyError, RuntimeError, TypeError) as error:
            self._progress = before
            raise SavedStateError(f"the saved state does not fit this model: {error}") from error
        if "learner" in state:  # older states have none
            self.learner.load_state_dict(state["learner"])
        self._load_stream(state["stream"])
        valid_loss, valid_position = state["valid"]
        self._recent.clear()
        self._publish(valid_loss=valid_loss, valid_position=valid_position)

    def save(self, path: Path) -> None:
        """Write the state to a file, atomically; training stands still meanwhile.

        Raises:
            OSError: the file cannot be written; an older one remains intact.
        """
        self._saves.save(path)

    def load(self, path: Path, *, exact: bool = True) -> None:
        """Resume from a file that `save` wrote, by `load_state_dict`.

        Raises:
            SavedStateError: the file is missing, damaged, or of another run, peer or model.
        """
        self.load_state_dict(self._read(path), exact=exact)

    def _read(self, path: Path) -> Mapping[str, Any]:
        """Return the state in a file and its shards; each rank has the tensors that it read."""
        state, shards = self._saver(path).load()
        try:
            return self.worker.places.shared(state, shards)
        except LayoutError as error:
            raise SavedStateError(f"{path} does not fit its shards: {error}") from error

    def _saver(self, path: Path) -> Saver:
        # Versions up to 0.1.0 named the run by the owner's paths, too.
        return Saver(path, self._ranks, run=self._saved_run(), older=self.spec.digest())

    def _saved_run(self) -> str:
        """Return what saved progress belongs to: the run, with the contents that it has here."""
        summary = self.corpus.summary if self.corpus is not None else None
        return by_contents(self.spec, summary.sha256 if summary is not None else None).digest()

    def _load_stream(self, state: Mapping[str, Any]) -> None:
        """Resume this rank's data, if the state is of as many ranks; else they begin anew."""
        if self._stream is None or isinstance(self._stream, UnitStream):
            return
        streams = state["ranks"] if "ranks" in state else [state]
        if len(streams) == self._ranks.size:
            self._stream.load_state_dict(streams[self._ranks.rank])
        else:
            _log.warning(
                "saved by %d ranks, resumed by %d: each begins its data anew",
                len(streams),
                self._ranks.size,
            )

    def _rest(self, step_s: float) -> float:
        """Sleep so that training takes only this peer's share of the time; return for how long.

        The rest follows the median of recent steps, because a single step of minutes means that
        the process or its machine was suspended.
        """
        self._steps_s.append(step_s)
        usual_s = statistics.median(self._steps_s)
        # A stage's step may have waited that long for the others' work.
        if step_s > LONGER * usual_s and not isinstance(self.learner, StageLearner):
            self._pace.leave_out(step_s - usual_s)
        if self.options.share == 1.0:
            return 0.0
        began_s = self.options.clock()
        self._stopping.wait(usual_s * (1.0 / self.options.share - 1.0))
        return self.options.clock() - began_s

    def _take(self, loss: float, tokens: int) -> None:
        self._progress.skips_in_a_row = 0
        self._progress.tokens += tokens * self._ranks.size
        self._progress.add_loss(loss)
        self._announce_window_end()
        self.worker.step(tokens=tokens, loss=loss)

    def _skip(self, loss: float, norm: float) -> None:
        self._progress.skipped += 1
        self._progress.skips_in_a_row += 1
        _log.warning("step %d skipped: loss %s, gradient norm %s", self._progress.steps, loss, norm)
        self.learner.clear()
        # A reset would also forget a contribution that is still on its way to a round.
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
                f"and gradient, the last after position {self._progress.position}; check this "
                "peer's data and the run's learning rate"
            )
        _log.warning("window dropped after %d skipped steps in a row", MAX_SKIPS)
        self._reducer.go_back(self._progress.position, self.worker.synced_N)
        # The moments come from the same steps as the parameters.
        self.learner.optimizer.state.clear()

    def _committed(self, commit: Commit) -> None:
        if isinstance(self._stream, UnitStream):
            self._stream.held.settle(commit)
        if commit.reset:
            self._progress.since_commit = 0
        elif commit.position != self._progress.position:
            self._progress.since_commit = self.worker.steps_since(commit)
        self._progress.position = commit.position
        if commit.included is not None:
            self._progress.dropped_in_a_row = 0

    def _make_room(self) -> None:
        """Drop what a step took, before a copy of the parameters is handed in and waited for."""
        waits = self.worker.delay == 0 and self.worker.inner_steps > 1
        if waits and isinstance(self.learner, Learner):  # a stage computes on meanwhile
            self.learner.clear()
            self._room.trim(self.worker.layout.numel)

    def _announce_window_end(self) -> None:
        last = self.worker.steps_left == 1
        self._publish(phase=TrainerPhase.REDUCING if last else TrainerPhase.TRAINING)

    def _validate_when_due(self) -> None:
        every, before = self.options.validate_every, self._progress.seen_position
        self._progress.seen_position = self._progress.position
        if not every or self._progress.position == before:
            return
        due = self._progress.position // every > before // every
        # The other stages of a pipeline leave once all rounds are there.
        is_last = self.finished and self.options.stage is None
        if is_last or (due and not self.finished and self._may_validate()):
            self._publish(phase=TrainerPhase.VALIDATING)
            began_s = self.options.clock()
            try:
                loss = self.evaluate(between=self._expect_no_stop)
            except _Stopped:
                self._progress.seen_position = before  # a trainer that resumes here validates then
            else:
                self._publish(valid_loss=loss, valid_position=self._progress.position)
            finally:
                took_s = self.options.clock() - began_s
                self._validate_s += took_s
                self._validate_from_s = began_s + took_s / self.options.validate_share

    def _may_validate(self) -> bool:
        """Return whether it is this peer's turn, and the last validation took its share by now."""
        is_turn = self.options.validates(self._progress.position)
        in_share = self.options.clock() >= self._validate_from_s
        return bool(self._ranks.agreed(is_turn and in_share))

    def _expect_no_stop(self) -> None:
        # A stop interrupts every validation but the last one of the run, which is its result.
        if self._ranks.agreed(self._stopping.is_set()) and not self.finished:
            raise _Stopped

    def _measure(self, step_s: float) -> None:
        self._recent.append((self.options.clock(), self._progress.tokens))
        (first_s, first), (last_s, last) = self._recent[0], self._recent[-1]
        is_warm = self._steps_here > WARM_STEPS
        if self._steps_here > WARM_STEPS + 1:
            # A step of minutes means a suspended process; others would expect this peer to be late.
            usual_s = self._statistics.step_s or step_s
            step_s = 0.9 * usual_s + 0.1 * min(step_s, LONGER * usual_s)
        left, method = self.worker.steps_left, self.worker.statistics()
        self._times.mark(method.windows, self.time_spent())
        self._publish(
            phase=TrainerPhase.TRAINING,
            tokens_per_s=(last - first) / (last_s - first_s) if last_s > first_s else 0.0,
            step_s=step_s,
            pace_s=self._pace.step_s or (step_s if is_warm else 0.0),
            ready_at_s=time.monotonic() + left * step_s,
            learning_rate=self.learner.optimizer.param_groups[0]["lr"],
        )

    def _publish(self, **changes: Any) -> None:  # noqa: ANN401 - fields of TrainerStatistics
        """Replace the record at once, so that readers in other threads see it whole."""
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
            spent=self._times.since(self.time_spent()),
            windows=method.windows,
            skipped_steps=self._progress.skipped,
            dropped_windows=self._progress.dropped + method.discarded,
            **changes,
        )
