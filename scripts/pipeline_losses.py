"""Train small models in stages, in one process, to see what a pipeline costs in loss.

The stages, codecs, optimizers and outer rounds are those of a run (`LocalPipeline`, `in_process`).
Microbatches pass one at a time, so nothing is late: staleness is 0, and no microbatch is lost. A
stage may have several peers. Each step then gives all of them equally many microbatches, drawn at
random anew for each stage, and the peers of a stage average by `diloco` after each window.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from atoll.compression.activations import parse_activations
from atoll.optim import Worker, in_process, methods
from atoll.optim.inner import build as build_optimizer
from atoll.optim.schedules import Rate
from atoll.peer.training.data import load as data
from atoll.peer.training.devices import Device
from atoll.peer.training.local_pipeline import LocalPipeline
from atoll.peer.training.stage_compute import StageCompute
from atoll.peer.training.stages import Slices, slices

SOURCE, BYTES = "stdlib", 256
SEQ_LEN, MICROBATCH, MICROBATCHES = 128, 2, 4
"""Positions, sequences of a microbatch, and microbatches of a step of all peers of a stage."""
STEP_TOKENS = MICROBATCHES * MICROBATCH * SEQ_LEN
BLOCKS = 4
WINDOW = 20  # steps
WARMUP, LAST_RATE = 0.1, 0.1  # fraction of the steps, and of the peak
CLIP_NORM = 1.0
VALID_BATCHES, VALID_BATCH = 16, 16


@dataclass(frozen=True, kw_only=True)
class Size:
    """A decoder, never tied."""

    dim: int
    heads: int
    ffn_dim: int

    def slices(self) -> Slices:
        """Return its slices, of which nothing is built."""
        shape = {"dim": self.dim, "num_heads": self.heads, "ffn_dim": self.ffn_dim}
        return slices(overrides=shape | {"num_layers": BLOCKS}, vocab_size=BYTES, seq_len=SEQ_LEN)


SIZES = {
    "0.25M": Size(dim=64, heads=2, ffn_dim=200),
    "0.93M": Size(dim=128, heads=4, ffn_dim=392),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The training of a model."""

    size: str
    seed: int
    steps: int
    """a multiple of `WINDOW`"""
    lr: float
    stages: int = 4
    peers: int = 1
    """of a stage"""
    mixes: bool = True
    """whether each stage draws the peers of microbatches by itself; else paths are fixed"""
    forward: str = "fp32"
    backward: str = "fp32"
    decays: bool = True
    """whether the learning rate falls after its warm-up"""

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step."""
        warmup_steps = int(WARMUP * self.steps)
        rate = Rate(peak=self.lr, warmup_steps=warmup_steps, min_ratio=LAST_RATE)
        return rate.at(step, self.steps if self.decays else 0)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer of a stage; with several of them, a worker steps its optimizer and averages."""

    compute: StageCompute
    optimizer: Optimizer
    worker: Worker | None

    def step(self, loss: float) -> None:
        """Take a step with the gradients that were added up."""
        tokens = self.compute.finish(clip_norm=CLIP_NORM).tokens
        if self.worker:
            self.worker.step(tokens=tokens, loss=loss)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()


class Training:
    """A model that trains as a setting says."""

    def __init__(self, setting: Setting) -> None:
        """Build the stages, and open the text."""
        self.setting = setting
        self.steps = 0
        model = SIZES[setting.size].slices()
        self._stages = [self._peers(model, each) for each in model.cut(setting.stages)]
        each_path = product(range(setting.peers), repeat=setting.stages)
        self._paths = {path: self._pipeline(path) for path in each_path}
        self._rng = random.Random(setting.seed)
        corpus = data.open_corpus(SOURCE, seq_len=SEQ_LEN)
        self._stream = corpus.stream(
            seed=setting.seed, peer_id="origin", batch_size=MICROBATCH, seq_len=SEQ_LEN
        )
        self._valid = corpus.validation(
            batches=VALID_BATCHES, batch_size=VALID_BATCH, seq_len=SEQ_LEN
        )

    def _peers(self, model: Slices, indices: range) -> list[Peer]:
        """Return the peers of a stage, which begin with the same parameters."""
        setting, device = self.setting, Device.choose("cpu")
        built = [model.build(indices, seed=setting.seed) for _ in range(setting.peers)]
        computes = [StageCompute(each, device) for each in built]
        optimizers = [build_optimizer("adamw", each.model, lr=setting.lr) for each in computes]
        workers: Sequence[Worker | None] = [None]
        if setting.peers > 1:
            workers = self._workers(computes, optimizers)
        return [
            Peer(compute=compute, optimizer=optimizer, worker=worker)
            for compute, optimizer, worker in zip(computes, optimizers, workers, strict=True)
        ]

    def _workers(
        self, computes: Sequence[StageCompute], optimizers: Sequence[Optimizer]
    ) -> list[Worker]:
        """Return workers that average, with the outer step that a run has by default."""
        rounds, peers = self.setting.steps // WINDOW, self.setting.peers
        options: dict[str, Any] = methods.defaults_for(
            "diloco", rounds=rounds, inner_steps=WINDOW, peers=peers
        )
        method = methods.parse("diloco", **options)
        group = in_process(peers, method, inner_steps=WINDOW, rounds=rounds)
        return [
            method.worker(compute.model, optimizer, group.member(n), inner_steps=WINDOW)
            for n, (compute, optimizer) in enumerate(zip(computes, optimizers, strict=True))
        ]

    def _pipeline(self, path: Sequence[int]) -> LocalPipeline:
        """Return the pipeline through one peer of each stage."""
        peers = [stage[n] for stage, n in zip(self._stages, path, strict=True)]
        codecs = self.setting.forward, self.setting.backward
        forward, backward = (parse_activations(each, seed=self.setting.seed) for each in codecs)
        return LocalPipeline(
            [peer.compute for peer in peers],
            [peer.optimizer for peer in peers],
            forward=forward,
            backward=backward,
        )

    def step(self) -> None:
        """Take a step at all peers of all stages."""
        losses = [
            self._paths[path].gradient([self._stream.next_batch()]) for path in self._routes()
        ]
        rate, loss = self.setting.rate_at(self.steps), sum(losses) / len(losses)
        for peer in (peer for stage in self._stages for peer in stage):
            for group in peer.optimizer.param_groups:
                group["lr"] = rate
            peer.step(loss)
        self.steps += 1

    def _routes(self) -> Iterator[tuple[int, ...]]:
        """Return the path of each microbatch of a step."""
        turns = [n % self.setting.peers for n in range(MICROBATCHES)]
        if not self.setting.mixes:
            return zip(*([turns] * self.setting.stages), strict=True)
        return zip(*(self._rng.sample(turns, len(turns)) for _ in self._stages), strict=True)

    def held_out(self, batches: int = VALID_BATCHES) -> float:
        """Return the loss on held-out text in nats a byte; between rounds, of the first peers."""
        chosen: list[Tensor] = self._valid[:: VALID_BATCHES // batches]
        return self._paths[(0,) * self.setting.stages].evaluate(chosen)
