"""Inputs of scripts/bench_codecs.py: random numbers, and a pseudo-gradient of a demo's run."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from atoll.coordinator.checkpoints import load_checkpoint
from atoll.optim.state.layout import Layout
from atoll.peer.lab.children import ATOLL
from atoll.peer.training.devices import Device
from atoll.peer.training.learner import Learner
from atoll.peer.training.opening import build_model, open_corpus

PEER_ID = "codec-benchmark"  # names the stream of data that it trains on


@dataclass(frozen=True, kw_only=True)
class PseudoGradient:
    values: torch.Tensor
    layout: Layout
    source: str  # in words, for the page


def distributions(numel, real):
    """Return the inputs by name."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(numel, generator=generator) - 0.5
    torch.manual_seed(0)
    return {
        "gaussian": torch.randn(numel, generator=generator),
        "laplace": -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp(max=0.4999999)),
        "student": torch.distributions.StudentT(3.0).sample((numel,)),
        "real": real,
    }


def demo_run(folder):
    """Run a short demo into `folder`, if it is not there yet."""
    if not checkpoints_of(folder):
        options = ["--peers", "2", "--rounds", "4", "--plain", "--out", str(folder)]
        subprocess.run([*ATOLL, "demo", *options], check=True, stdout=subprocess.DEVNULL)
    return folder


def checkpoints_of(folder):
    return sorted((Path(folder) / "coordinator" / "checkpoints").glob("*.safetensors"))


def pseudo_gradient(folder):
    """Return what a peer that follows the run in `folder` would send next.

    Its newest checkpoint is trained for a window with the run's model, data, optimizer and
    schedule: synced - local. A window before that, from the same parameters, fills the moments
    of the optimizer, which a checkpoint does not hold.
    """
    found = checkpoints_of(folder)
    if not found:
        raise SystemExit(
            f"{folder}: expected the folder of a demo's run, with a checkpoint in "
            f"coordinator/checkpoints; make one with: atoll demo --out {folder}"
        )
    checkpoint = load_checkpoint(found[-1])
    spec = checkpoint.spec
    values = _train(checkpoint)
    source = (
        f"the pseudo-gradient of {spec.outer.inner_steps} steps from position "
        f"{checkpoint.position} of the demo's run {checkpoint.run_id.hex()[:12]} "
        f"(preset {spec.model.preset}, {values.numel():,} values)"
    )
    return PseudoGradient(values=values, layout=checkpoint.layout, source=source)


def layers(real):
    """Return the tensors of a pseudo-gradient by name."""
    return dict(zip(real.layout.names, real.layout.split(real.values), strict=True))


def _train(checkpoint):
    spec, layout = checkpoint.spec, checkpoint.layout
    corpus = open_corpus(spec)
    model = build_model(spec, corpus.tokenizer.vocab_size)
    steps = spec.outer.inner_steps
    first = checkpoint.position * steps
    learner = Learner(
        model,
        spec.inner,
        Device.choose("cpu", spec.inner.precision),
        total_steps=max(spec.run.rounds * steps, first + steps),
    )
    stream = corpus.stream(
        seed=spec.run.seed,
        peer_id=PEER_ID,
        batch_size=spec.inner.batch_size,
        seq_len=spec.data.seq_len,
    )
    for _ in range(2):
        layout.load_(model, checkpoint.params_N)
        for step in range(first, first + steps):
            learner.gradient([stream.next_batch()], step=step)
            learner.optimizer.step()
    return checkpoint.params_N - layout.flatten(model)
