"""Sample text from a trained model, one token at a time.

The model sees at most the last `seq_len` tokens, the length that it was trained on.

# T positions, V vocabulary
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from atoll.coordinator.checkpoints import Checkpoint
from atoll.peer.errors import SetupError
from atoll.peer.training import models
from atoll.peer.training.data import load as data
from atoll.peer.training.devices import Device
from atoll.peer.training.trained import load_checkpoint


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options for drawing tokens."""

    max_tokens: int = 200
    """Maximum number of tokens; an end-of-document token ends the text earlier."""
    temperature: float = 0.8
    """Divisor of the logits; 0 always takes the most likely token."""
    top_k: int = 0
    """Number of most likely tokens to draw from; 0 for all."""
    seed: int = 0
    """Seed of the draws; the same seed gives the same text."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "temperature", "top_k"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise SetupError(f"expected {name} of at least 0, got {value}")


def sample(
    checkpoint: Path | Checkpoint,
    prompt: str,
    options: SamplingOptions | None = None,
    *,
    device: str = "auto",
    allow_models: Collection[str] = (),
    any_model_source: bool = False,
    tokenizer: str | None = None,
    init: str | None = None,
) -> Iterator[str]:
    """Continue a text with the model of a checkpoint.

    Load and check everything before returning; the text is drawn as the iterator advances.

    Args:
        checkpoint: a checkpoint, its file, or a folder, as `load_checkpoint` takes it.
        prompt: the text to continue; not repeated in the output.
        options: options for drawing.
        device: device name, see `Device.choose`.
        allow_models: custom models that the checkpoint may name; it was written by anyone.
        any_model_source: accept a custom model of another source than the one that was trained.
        tokenizer: the tokenizer's file on this machine; one that the checkpoint names is not read.
        init: folder of the weights with which the run began, if it trained adapters.

    Returns:
        Pieces of text, often single characters.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        LayoutError: its parameters do not fit its model.
        SetupError: its model or its tokenizer is not allowed, or not usable here, or of another
            size; the device is not usable; or an option is negative or not finite.
    """
    trained = load_checkpoint(
        checkpoint,
        allow_model=allow_models,
        any_source=any_model_source,
        tokenizer=tokenizer,
        init=init,
    )
    spec = trained.spec
    return generate(
        trained.model,
        trained.tokenizer,
        prompt,
        options or SamplingOptions(),
        context=spec.data.seq_len,
        device=Device.choose(device, spec.inner.precision),
    )


def generate(
    model: nn.Module,
    tokenizer: data.Tokenizer,
    prompt: str,
    options: SamplingOptions,
    *,
    context: int,
    device: Device,
) -> Iterator[str]:
    """Continue a text with a model.

    Args:
        model: a module that meets the contract of `atoll.peer.training.models`; moved to the
            device and put in evaluation mode.
        tokenizer: the model's tokenizer.
        prompt: the text to continue; an empty one begins a document.
        options: options for drawing.
        context: maximum number of tokens that the model sees.
        device: device to compute on.

    Yields:
        Pieces of text; a character of several tokens is never split.
    """
    model.to(device.device).eval()
    text = Continuation(tokenizer, prompt, options)
    while not text.is_over:
        if piece := text.take(_next_logits(model, text.tokens[-context:], device)):
            yield piece


class Continuation:
    """A text that is continued token by token, whoever computes the logits."""

    def __init__(self, tokenizer: data.Tokenizer, prompt: str, options: SamplingOptions) -> None:
        """Begin with a prompt; an empty one begins a document."""
        self._tokenizer, self._options = tokenizer, options
        given = prompt.encode("utf-8", "surrogateescape")  # as argv has bytes that are not UTF-8
        start = tokenizer.end_token or 0
        self.tokens = [int(token) for token in tokenizer.encode(given)] or [start]
        """of the prompt, and those that were drawn"""
        self.num_drawn = 0
        self._generator = torch.Generator().manual_seed(options.seed)
        self._decoder = tokenizer.decoder()
        self._has_ended = False

    @property
    def is_over(self) -> bool:
        """Return whether the document has ended, or the text is as long as it may get."""
        return self._has_ended or self.num_drawn >= self._options.max_tokens

    def take(self, logits_V: Tensor) -> str:
        """Draw the next token; return the characters that it completes, often one, or none.

        Args:
            logits_V: float32, on the CPU, after the tokens so far.
        """
        token = pick(logits_V, self._options, self._generator)
        if token == self._tokenizer.end_token:
            self._has_ended = True
            return ""
        self.tokens.append(token)
        self.num_drawn += 1
        return self._decoder.feed(token)


@torch.no_grad()
def _next_logits(model: nn.Module, tokens: list[int], device: Device) -> Tensor:
    tokens_1T = torch.tensor([tokens], device=device.device)
    with device.autocast():
        logits_1TV = models.logits_of(model, tokens_1T)
    return logits_1TV[0, -1].float().cpu()


def pick(logits_V: Tensor, options: SamplingOptions, generator: torch.Generator) -> int:
    """Draw one token.

    Args:
        logits_V: float32 logits on the CPU.
        options: options for drawing.
        generator: random generator on the CPU.
    """
    if options.temperature == 0:
        return int(logits_V.argmax())
    if 0 < options.top_k < len(logits_V):
        limit = logits_V.topk(options.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < limit, -math.inf)
    chances_V = torch.softmax(logits_V / options.temperature, dim=-1)
    return int(torch.multinomial(chances_V, 1, generator=generator))
