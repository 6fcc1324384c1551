"""All stages of a pipeline in one process, one after another: what a run computes, without peers.

It measures what a codec costs in loss, and is the reference for pipelines over a network: with
float32 between its stages it computes what the model in one piece computes.

# B sequences, T positions, D width, R = B T rows
"""

import hashlib
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from atoll.compression.activations import ActivationCodec
from atoll.peer.training.stage_compute import Half, StageCompute


class LocalPipeline:
    """Stages with an inner optimizer each; microbatches pass one at a time."""

    def __init__(
        self,
        stages: Sequence[StageCompute],
        optimizers: Sequence[Optimizer],
        *,
        forward: ActivationCodec | None = None,
        backward: ActivationCodec | None = None,
        clip_norm: float = 0.0,
    ) -> None:
        """Take the stages of one model, in order.

        Args:
            stages: from the first to the last.
            optimizers: of each stage's parameters.
            forward: codec of the activations at every cut; None sends them as they are.
            backward: codec of their gradients.
            clip_norm: largest norm of the gradient of a stage; 0 clips nothing.
        """
        self.stages, self.optimizers = stages, optimizers
        self._forward, self._backward = forward, backward
        self._clip_norm = clip_norm
        self._microbatches = 0

    def step(self, batches: Sequence[Tensor]) -> float:
        """Take one step of every stage on some microbatches; return their mean loss in nats.

        Args:
            batches: int64 tokens `(B, T + 1)` each.
        """
        loss = self.gradient(batches)
        for stage, optimizer in zip(self.stages, self.optimizers, strict=True):
            stage.finish(clip_norm=self._clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def gradient(self, batches: Sequence[Tensor]) -> float:
        """Add the gradients of some microbatches at every stage; return their mean loss."""
        halves = [self._pass(batch[:, :-1], batch[:, 1:]) for batch in batches]
        tokens = sum(half.tokens for half in halves)
        return sum((half.loss or 0.0) * half.tokens for half in halves) / tokens

    def evaluate(self, batches: Iterable[Tensor]) -> float:
        """Return the mean loss per token of batches `(B, T + 1)`, in nats."""
        total = tokens = 0.0
        for batch in batches:
            x, targets_BT = batch[:, :-1], batch[:, 1:]
            for number, stage in enumerate(self.stages[:-1]):
                x = _sent(stage.evaluate(x), self._forward, f"evaluate/{number}")
            loss = self.stages[-1].evaluate(x, targets_BT)
            total += float(loss) * targets_BT.numel()
            tokens += targets_BT.numel()
        return total / tokens

    def _pass(self, tokens_BT: Tensor, targets_BT: Tensor) -> Half:
        """Send a microbatch there and back; return what the last stage found."""
        name = str(self._microbatches)
        self._microbatches += 1
        seed = _seed(name)
        *earlier, last = self.stages
        inputs = [tokens_BT]
        for number, stage in enumerate(earlier):
            output_BTD = stage.forward(inputs[-1], seed=seed)
            inputs.append(_sent(output_BTD, self._forward, f"{name}/forward/{number}"))
        found = half = last.loss_and_gradient(inputs.pop(), targets_BT, seed=seed)
        last.add(half.weights())
        for number, stage in reversed(list(enumerate(earlier))):
            assert half.input_gradient_BTD is not None  # of every stage but the first
            gradient_BTD = _sent(
                half.input_gradient_BTD, self._backward, f"{name}/backward/{number}"
            )
            half = stage.backward(inputs.pop(), gradient_BTD, seed=seed)
            stage.add(half.weights())
        return found


def _sent(x_BTD: Tensor, codec: ActivationCodec | None, name: str) -> Tensor:
    """Return what arrives at the other side of a cut."""
    if codec is None:
        return x_BTD
    x_RD = x_BTD.flatten(0, 1)
    frame = codec.encode(x_RD, seed=_seed(name))
    return codec.decode(frame, *x_RD.shape).view(x_BTD.shape)


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
