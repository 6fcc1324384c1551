"""Data-parallel training in one process, as a baseline for a run.

Each step averages the gradients of one batch per peer, so the baseline sees the same number of
tokens in the same number of steps, with the same schedule and initial weights. `alone` trains on
the stream of a single peer, in the same number of steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state.layout import Layout
from atoll.peer.errors import SetupError
from atoll.peer.training.data import load as data
from atoll.peer.training.devices import Device
from atoll.peer.training.learner import Evaluator, Learner
from atoll.peer.training.opening import (
    VALID_BATCHES,
    build_model,
    open_corpus,
    separate_documents,
    validation,
)
from atoll.peer.training.trainer import MAX_DROPPED, MAX_SKIPS, TrainingFailed


@dataclass(frozen=True, kw_only=True)
class BaselinePoint:
    """One window of the baseline, as long as a window of the run."""

    position: int
    """Windows completed; corresponds to the position of the log."""
    tokens: int
    """Tokens seen so far."""
    loss: float
    """Mean training loss of the window, in nats per token."""
    valid_loss: float | None = None
    """Loss on held-out text at its end; None if not measured."""


@dataclass(frozen=True, kw_only=True)
class BaselineResult:
    """Result of a baseline."""

    peers: int
    """Batches per step."""
    steps: int
    """Steps taken, without skipped ones."""
    skipped_steps: int
    """Steps whose loss or gradient was not finite."""
    tokens: int
    """Tokens seen."""
    history: list[BaselinePoint]
    """One point per window."""
    loss: float
    """Training loss of the last window."""
    valid_loss: float
    """Loss on held-out text at the end."""
    seconds: float
    """Seconds of training, without validation."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def baseline(
    spec: RunSpec,
    *,
    peer_ids: Sequence[str],
    rounds: int | None = None,
    device: str = "auto",
    corpus: data.Corpus | None = None,
    validate_every: int = 0,
    valid_batches: int = VALID_BATCHES,
    progress: Callable[[BaselinePoint], None] | None = None,
) -> BaselineResult:
    """Train synchronously on the streams of several peers.

    Args:
        spec: spec of the run to compare with.
        peer_ids: peers whose streams are drawn, one batch each per step.
        rounds: windows to train; the spec's number by default.
        device: device name, see `Device.choose`.
        corpus: the data of the run, if already open.
        validate_every: windows between measurements on held-out text; 0 for the end only.
        valid_batches: batches of each measurement.
        progress: called after each window.

    Raises:
        SetupError: the run has no end, or its data, model or device is not usable.
        TrainingFailed: too many steps in a row had non-finite numbers.
    """
    rounds = rounds or spec.run.rounds
    if not rounds or not peer_ids:
        raise SetupError(
            f"a baseline needs an end and data: expected rounds and peers above 0, got "
            f"{rounds} rounds and {len(peer_ids)} peers; set rounds of [run]"
        )
    loop = _Baseline(spec, peer_ids, rounds, device, corpus or open_corpus(spec), valid_batches)
    for position in range(1, rounds + 1):
        measured = position == rounds or (validate_every > 0 and position % validate_every == 0)
        point = loop.window(position, measured=measured)
        if progress is not None:
            progress(point)
    return loop.result()


def alone(
    spec: RunSpec,
    *,
    peer_id: str,
    rounds: int | None = None,
    device: str = "auto",
    corpus: data.Corpus | None = None,
    validate_every: int = 0,
    valid_batches: int = VALID_BATCHES,
    progress: Callable[[BaselinePoint], None] | None = None,
) -> BaselineResult:
    """Train on the stream of one peer alone; the other arguments are those of `baseline`."""
    return baseline(
        spec,
        peer_ids=[peer_id],
        rounds=rounds,
        device=device,
        corpus=corpus,
        validate_every=validate_every,
        valid_batches=valid_batches,
        progress=progress,
    )


class _Baseline:
    def __init__(
        self,
        spec: RunSpec,
        peer_ids: Sequence[str],
        rounds: int,
        device: str,
        corpus: data.Corpus,
        valid_batches: int,
    ) -> None:
        self._spec = spec
        chosen = Device.choose(device, spec.inner.precision)
        model = build_model(spec, corpus.tokenizer.vocab_size)
        separate_documents(spec, model, corpus.tokenizer)
        self._evaluator = Evaluator(model, validation(spec, corpus, valid_batches), chosen)
        self._layout = Layout.of(model)
        num_fragments = len(spec.method().fragments(self._layout))
        self._timetable = spec.timetable(num_fragments, rounds=rounds)
        total_steps = self._timetable.total_steps
        self._learner = Learner(model, spec.inner, chosen, total_steps=total_steps)
        self._streams = [
            corpus.stream(
                seed=spec.run.seed,
                peer_id=peer_id,
                batch_size=spec.inner.batch_size,
                seq_len=spec.data.seq_len,
            )
            for peer_id in peer_ids
        ]
        self._tried = self._taken = self._skips_in_a_row = 0
        self._seconds = 0.0
        self._history: list[BaselinePoint] = []

    def window(self, position: int, *, measured: bool) -> BaselinePoint:
        began_s = perf_counter()
        until = self._timetable.steps_until
        num_steps = until(position) - until(position - 1)
        losses = [self._step() for _ in range(num_steps)]
        taken = [loss for loss in losses if loss is not None]
        self._seconds += perf_counter() - began_s
        valid_loss = None
        if measured:
            valid_loss = self._evaluator.loss(self._layout.flatten(self._learner.model))
        point = BaselinePoint(
            position=position,
            tokens=self._taken * len(self._streams) * self._spec.step_tokens,
            loss=sum(taken) / len(taken) if taken else float("nan"),
            valid_loss=valid_loss,
        )
        self._history.append(point)
        return point

    def _step(self) -> float | None:
        repeats = self._spec.inner.grad_accumulation
        batches = [stream.next_batch() for stream in self._streams for _ in range(repeats)]
        gradient = self._learner.gradient(batches, step=self._tried)
        self._tried += 1
        if not gradient.is_finite:
            self._skip()
            return None
        self._skips_in_a_row = 0
        self._taken += 1
        self._learner.optimizer.step()
        return gradient.loss

    def _skip(self) -> None:
        self._skips_in_a_row += 1
        if self._skips_in_a_row >= MAX_SKIPS * MAX_DROPPED:
            raise TrainingFailed(
                f"{self._skips_in_a_row} steps of the baseline in a row had no finite loss and "
                "gradient; check the run's learning rate"
            )

    def result(self) -> BaselineResult:
        last = self._history[-1]
        return BaselineResult(
            peers=len(self._streams),
            steps=self._taken,
            skipped_steps=self._tried - self._taken,
            tokens=last.tokens,
            history=self._history,
            loss=last.loss,
            valid_loss=last.valid_loss if last.valid_loss is not None else float("nan"),
            seconds=self._seconds,
        )
