"""Simulate a run with many workers in one process, to measure a method's loss and traffic.

The workers are those of a real run: the same methods, codecs, weights and outer steps, on real
text, in lockstep. Bytes are the lengths of the frames that they exchange; `simulation_report`
converts them to seconds.

# T steps of the median worker, W workers
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from atoll.compression.registry import split_top
from atoll.optim import Worker, in_process, inner, methods
from atoll.optim.inprocess.group import at_random
from atoll.optim.methods.base import InnerName
from atoll.peer.errors import SavedStateError, SetupError
from atoll.peer.lab.simulation_settings import RATE_SHARES, Settings
from atoll.peer.training import models, saved
from atoll.peer.training.data import load as data
from atoll.peer.training.devices import Device
from atoll.peer.training.learner import Evaluator

VALID_BATCH = 16  # sequences
SAVE_EVERY_S = 120.0  # an interrupted simulation repeats at most this much work


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement of a method."""

    step: int
    tokens: int
    """Tokens of all workers together."""
    sent_bytes: int
    """Payload sent per worker so far, on average."""
    valid_loss: float
    """Loss of the synced parameters on held-out text, in nats per token."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of one method with one seed."""

    method: str
    """Name of the method."""
    spec: str
    """Full spec of the method, with all options."""
    seed: int
    params: int
    points: list[Point]
    sent: list[tuple[int, int]]
    """Step and payload per worker, for each step after which something was sent."""
    delay: int
    """Steps that a reduction may take."""
    seconds: float
    """Seconds that this machine took to compute it."""
    update_bytes: int = 0
    """Length of all updates together, which a follower of the log receives."""

    @property
    def valid_loss(self) -> float:
        """Loss on held-out text at the end, in nats per token."""
        return self.points[-1].valid_loss

    @property
    def sent_bytes(self) -> int:
        """Payload sent per worker over the whole run."""
        return self.points[-1].sent_bytes

    @classmethod
    def from_json(cls, fields_: Mapping[str, Any]) -> "Result":
        """Read a result from the JSON of `dataclasses.asdict`."""
        points = [Point(**point) for point in fields_["points"]]
        sent = [(int(step), int(size)) for step, size in fields_["sent"]]
        return cls(**{**fields_, "points": points, "sent": sent})


Say = Callable[[str], None]


def parse_methods(text: str, settings: Settings) -> list[methods.Method]:
    """Parse a list of methods such as `ddp,diloco(codec=int4),streaming`.

    Options that a spec leaves open follow the run: the outer rate and momentum follow its length,
    `peers` is the number of workers, and `ddp` clips the mean gradient as a single model with one
    batch would.

    Raises:
        MethodError: an unknown method or option.
        CodecError: an unknown codec.
        SetupError: the list is empty.
    """
    specs = [item.strip() for item in split_top(text, ",") if item.strip()]
    if not specs:
        raise SetupError(f"expected at least one method among {', '.join(methods.names())}")
    return [_with_defaults(spec, settings) for spec in specs]


def _with_defaults(spec: str, settings: Settings) -> methods.Method:
    method = methods.parse(spec)
    open_ = methods.defaults_for(
        spec,
        rounds=max(1, settings.timetable.turn_at(settings.steps)),
        inner_steps=settings.inner_steps,
        peers=settings.workers,
    )
    if isinstance(method, methods.DDPMethod):
        open_["clip_norm"] = settings.clip_norm
    given = methods.given(spec)
    return methods.parse(spec, **{key: open_[key] for key in open_.keys() - given})


class Bench:
    """Text, device and held-out batches that all methods of a simulation share."""

    def __init__(self, settings: Settings, device: str = "cpu", *, compiles: bool = False) -> None:
        """Open the text.

        Args:
            settings: what all methods share.
            device: device name, see `Device.choose`.
            compiles: compile models: a step of a GPU takes about half of the time.

        Raises:
            DataError: the text cannot be read or is too short.
            SetupError: the device cannot be used.
        """
        self.settings, self.compiles = settings, compiles
        self.device = Device.choose(device)
        self.corpus = data.open_corpus(settings.source, seq_len=settings.seq_len)
        self.valid = self.corpus.validation(
            batches=settings.valid_batches, batch_size=VALID_BATCH, seq_len=settings.seq_len
        )

    def model(self, seed: int) -> nn.Module:
        """Build a model on the device; equal seeds give equal weights."""
        settings = self.settings
        return models.build(
            settings.model,
            overrides=settings.overrides,
            vocab_size=self.corpus.tokenizer.vocab_size,
            seq_len=settings.seq_len,
            seed=seed,
        ).to(self.device.device)

    def stream(self, seed: int, worker: int) -> data.TokenStream:
        """Return a worker's training stream, from all of the text or from the worker's part.

        Raises:
            SetupError: the text cannot be split among the workers.
        """
        corpus = self._part(worker) if self.settings.split_data else self.corpus
        return corpus.stream(
            seed=seed,
            peer_id=f"worker {worker}",
            batch_size=self.settings.batch_size,
            seq_len=self.settings.seq_len,
        )

    def _part(self, worker: int) -> data.Corpus:
        # Consecutive documents, so that parts differ: for `stdlib`, each has other packages.
        whole, workers = self.corpus, self.settings.workers
        if not isinstance(whole, data.LocalCorpus):
            raise SetupError("a streamed data set cannot be split among workers; use a local text")
        cuts = [len(whole.train_N) * index // workers for index in (worker, worker + 1)]
        if cuts[1] - cuts[0] <= self.settings.seq_len:
            raise SetupError(f"the text is too short to split among {workers} workers; add text")
        return data.LocalCorpus(
            train_N=whole.train_N[cuts[0] : cuts[1]],
            valid_N=whole.valid_N,
            tokenizer=whole.tokenizer,
        )


class Simulation:
    """One method with one seed, simulated step by step."""

    def __init__(self, bench: Bench, method: methods.Method, seed: int) -> None:
        """Build the workers.

        Raises:
            SetupError: the method does not support the settings.
        """
        settings = bench.settings
        if settings.speeds and method.every_step:
            raise SetupError(
                f"{method.name} has no windows whose length could follow a worker's speed; "
                "simulate it without speeds"
            )
        self.bench, self.method, self.seed = bench, method, seed
        misses = at_random(settings.drop, seed)
        self.group = in_process(settings.workers, method, misses=misses)
        self._inner: InnerName = method.inner
        if settings.inner and not method.every_step:
            self._inner = cast(InnerName, settings.inner)
        self._rate = settings.rate(RATE_SHARES[self._inner])
        self._timetable = settings.timetable
        late = 1 if settings.join_step > 0 else 0
        self._forwards: list[nn.Module] = []
        self.workers = [self._worker(index) for index in range(settings.workers - late)]
        self._streams = [bench.stream(seed, index) for index in range(settings.workers)]
        self._evaluator = Evaluator(bench.model(seed), bench.valid, bench.device)
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.points: list[Point] = []
        self.sent: list[tuple[int, int]] = []

    def _worker(self, index: int) -> Worker:
        model = self.bench.model(self.seed)
        compiled = cast(nn.Module, torch.compile(model)) if self.bench.compiles else model
        self._forwards.append(compiled)
        fused = True if self.bench.device.device.type == "cuda" else None
        optimizer = inner.build(self._inner, model, lr=self._rate.peak, fused=fused)
        return self.method.worker(
            model,
            optimizer,
            self.group.member(index),
            inner_steps=self.bench.settings.windows[index],
        )

    @property
    def finished(self) -> bool:
        """Return whether all steps are done."""
        return self.step >= self.bench.settings.steps

    def advance(self) -> None:
        """Take one step of the median worker, and a measurement if one is due."""
        began_s, before = time.perf_counter(), self.sent_bytes
        settings = self.bench.settings
        if self.step == settings.join_step > 0:
            self.workers.append(self._worker(settings.workers - 1))
        rate = self._rate.at(self.step, settings.steps)
        for worker in self.workers:
            for group in worker.inner.param_groups:
                group["lr"] = rate
        for index, worker in enumerate(self.workers):
            self._size_window(worker)
            for _ in range(self._steps_of(index)):
                self._train(worker, self._forwards[index], self._streams[index].next_batch())
        self.step += 1
        if self.sent_bytes > before:
            self.sent.append((self.step, self.sent_bytes - before))
        if self.step * settings.points // settings.steps > len(self.points):
            self.points.append(
                Point(
                    step=self.step,
                    tokens=self.tokens,
                    sent_bytes=self.sent_bytes,
                    valid_loss=self._evaluator.loss(self.workers[0].synced_N),
                )
            )
        self.seconds += time.perf_counter() - began_s

    def _size_window(self, worker: Worker) -> None:
        if self.bench.settings.growth and not self.method.every_step:
            inner_steps = self._timetable.window(worker.next_position // len(worker.fragments))
            worker.resize(inner_steps, delay=self.method.hidden_steps(inner_steps))

    def _steps_of(self, index: int) -> int:
        """Return the steps that a worker takes while the median one takes one."""
        settings = self.bench.settings
        before, after = (
            step * settings.windows[index] // settings.inner_steps
            for step in (self.step, self.step + 1)
        )
        return after - before

    @property
    def sent_bytes(self) -> int:
        """Payload sent per worker so far, on average."""
        return round(self.group.statistics().wire_bytes / self.group.size)

    def _train(self, worker: Worker, forward: nn.Module, batch_BT: Tensor) -> None:
        tokens_BT = batch_BT.to(self.bench.device.device)
        worker.inner.zero_grad()
        with self.bench.device.autocast():
            loss = models.loss_of(forward, tokens_BT[:, :-1], tokens_BT[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        if not isinstance(self.method, methods.DDPMethod):  # it clips the mean gradient
            limit = self.bench.settings.clip_norm
            torch.nn.utils.clip_grad_norm_(worker.model.parameters(), limit)
        worker.step(tokens=tokens_BT[:, 1:].numel(), loss=loss)
        self.tokens += tokens_BT[:, 1:].numel()

    def result(self) -> Result:
        """Return the result so far."""
        worker = self.workers[0]
        return Result(
            method=self.method.name,
            spec=self.method.spec,
            seed=self.seed,
            params=worker.layout.numel,
            points=self.points,
            sent=self.sent,
            delay=worker.delay,
            seconds=round(self.seconds, 1),
            update_bytes=self.group.statistics().body_bytes,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the full state; valid between two steps."""
        return {
            "workers": [worker.state_dict() for worker in self.workers],
            "streams": [stream.state_dict() for stream in self._streams],
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "points": [asdict(point) for point in self.points],
            "sent": [list(pair) for pair in self.sent],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state that `state_dict` returned, with the same bits."""
        while len(self.workers) < len(state["workers"]):
            self.workers.append(self._worker(len(self.workers)))
        for worker, kept in zip(self.workers, state["workers"], strict=True):
            worker.load_state_dict(kept)
        for stream, kept in zip(self._streams, state["streams"], strict=True):
            stream.load_state_dict(kept)
        self.step, self.tokens = state["step"], state["tokens"]
        self.seconds = state["seconds"]
        self.points = [Point(**point) for point in state["points"]]
        self.sent = [(step, size) for step, size in state["sent"]]


class Folder:
    """Folder of results and unfinished simulations, named by all that they depend on."""

    def __init__(self, path: Path, settings: Settings) -> None:
        """Use a folder, which is created when first used."""
        self.path, self._settings = path, settings

    def result(self, method: methods.Method, seed: int) -> Result | None:
        """Return the stored result; None if there is none.

        Raises:
            SavedStateError: the file is damaged.
        """
        file = self._file(method, seed, "json")
        try:
            return Result.from_json(json.loads(file.read_text())["result"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise SavedStateError(f"{file} is damaged ({error}); move it away") from error

    def keep(self, result: Result, method: methods.Method) -> None:
        """Store a result and delete the state of its unfinished simulation."""
        file = self._file(method, result.seed, "json")
        text = json.dumps({"settings": asdict(self._settings), "result": asdict(result)})
        partial = file.with_suffix(".partial")
        partial.write_text(text + "\n")
        partial.replace(file)
        self._file(method, result.seed, "safetensors").unlink(missing_ok=True)

    def resume(self, simulation: Simulation) -> bool:
        """Resume an unfinished simulation; return False if there is none."""
        file = self._file(simulation.method, simulation.seed, "safetensors")
        if not file.exists():
            return False
        run = self._key(simulation.method, simulation.seed)
        simulation.load_state_dict(saved.load(file, kind="simulation", run=run))
        return True

    def save(self, simulation: Simulation) -> None:
        """Store the state of an unfinished simulation."""
        file = self._file(simulation.method, simulation.seed, "safetensors")
        run = self._key(simulation.method, simulation.seed)
        saved.save(file, simulation.state_dict(), kind="simulation", run=run)

    def _key(self, method: methods.Method, seed: int) -> str:
        settings = asdict(self._settings)
        if not self._settings.growth:  # keeps the names of results older than this option
            del settings["growth"], settings["max_inner_steps"]
        text = json.dumps([settings, method.spec, seed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _file(self, method: methods.Method, seed: int, suffix: str) -> Path:
        self.path.mkdir(parents=True, exist_ok=True)
        return self.path / f"{method.name}-{self._key(method, seed)}.{suffix}"


def simulate(
    bench: Bench, method: methods.Method, *, seed: int, folder: Folder, rerun: bool, say: Say
) -> Result:
    """Train one method with one seed, or return its result from the folder.

    Args:
        bench: text and settings.
        method: method with all its options.
        seed: seed of weights and data.
        folder: folder to read results from and to store them in.
        rerun: whether to train again if there is a result.
        say: prints a line about progress.
    """
    known = None if rerun else folder.result(method, seed)
    if known is not None:
        return known
    simulation = Simulation(bench, method, seed)
    if not rerun and folder.resume(simulation):
        say(f"{method.name}, seed {seed}: resumes at step {simulation.step}")
    saved_s = time.monotonic()
    while not simulation.finished:
        measured = len(simulation.points)
        simulation.advance()
        if len(simulation.points) > measured:
            say(_line(simulation))
        if time.monotonic() - saved_s > SAVE_EVERY_S:
            folder.save(simulation)
            saved_s = time.monotonic()
    result = simulation.result()
    folder.keep(result, method)
    return result


def _line(simulation: Simulation) -> str:
    point, steps = simulation.points[-1], simulation.bench.settings.steps
    left_s = simulation.seconds / simulation.step * (steps - simulation.step)
    return (
        f"{simulation.method.name}, seed {simulation.seed}: step {point.step} of {steps}, "
        f"loss {point.valid_loss:.3f}, {point.sent_bytes / 1e6:.1f} MB per worker, "
        f"{left_s:.0f} s left"
    )
