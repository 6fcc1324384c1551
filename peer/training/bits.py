"""Bits a byte: the loss of a model on text, by a measure that does not depend on its tokenizer.

    bits a byte = nats of all tokens / (ln 2 x bytes of their text)

The text is measured in sequences of the run's length, spaced evenly, and in each from the second
token on; no token sees more than its sequence.

# B sequences, T positions
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.coordinator.run.spec import RunSpec
from atoll.peer.errors import DataError
from atoll.peer.training import models
from atoll.peer.training.data.corpus import Corpus, LocalCorpus, even_windows
from atoll.peer.training.data.shards import TokenFiles
from atoll.peer.training.data.tokens import Tokenizer
from atoll.peer.training.devices import Device
from atoll.peer.training.opening import open_corpus
from atoll.peer.training.permission import Allowed, with_own_files
from atoll.peer.training.trained import Trained


@dataclass(frozen=True, kw_only=True)
class Bits:
    """A model's loss on a text."""

    bits_per_byte: float
    loss: float
    """Mean, in nats per token."""
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Text to measure on."""

    name: str
    """What it is, for people."""
    batches: Sequence[Tensor]
    """Int64 tokens `(B, T + 1)` each."""


def held_out(trained: Trained, *, data: str | None, tokenizer: str | None, tokens: int) -> HeldOut:
    """Return the text that a run holds out, or another one.

    Args:
        trained: the model of a checkpoint, whose spec says how the run divides its text.
        data: this machine's text. The run's own text, by its digest, gives the part that the run
            holds out; any other is taken whole. None for the run's own text, if it is built in or a
            public data set.
        tokenizer: the tokenizer's file, if the owner has named one.
        tokens: number of tokens, at most; whole batches.

    Raises:
        DataError: the text is not allowed, missing, or too short for one sequence.
    """
    spec = with_own_files(trained.spec, data=data, tokenizer=None)
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"same_text": False})})
    files = frozenset(name for name in (data, tokenizer) if name is not None)
    corpus = open_corpus(spec, Allowed(files=files))
    batch_tokens = spec.inner.batch_size * spec.data.seq_len
    batches = max(1, tokens // batch_tokens)
    if isinstance(corpus, LocalCorpus):
        is_other = data is not None and not _is_own(spec, corpus)
        all_N = corpus.valid_N
        if is_other:
            all_N = TokenFiles([corpus.train_N, corpus.valid_N], corpus.tokenizer.vocab_size)
        batches = min(batches, math.ceil(len(all_N) / batch_tokens))
        windows = even_windows(all_N, batches, spec.inner.batch_size, spec.data.seq_len)
        name = f"all of {data}" if is_other else "held-out text of the run"
        return HeldOut(name=name, batches=windows)
    windows = corpus.validation(
        batches=batches, batch_size=spec.inner.batch_size, seq_len=spec.data.seq_len
    )
    return HeldOut(name="held-out text of the run", batches=windows)


def _is_own(spec: RunSpec, corpus: Corpus) -> bool:
    found, stated = corpus.summary, spec.data.sha256
    return found is None or stated is None or found.sha256 == stated


@torch.no_grad()
def measure(
    model: nn.Module,
    tokenizer: Tokenizer,
    batches: Sequence[Tensor],
    *,
    device: Device,
    on_batch: Callable[[int], object] = lambda done: None,
) -> Bits:
    """Measure a model on batches of tokens.

    Args:
        model: a module that meets the contract of `atoll.peer.training.models`; moved to the
            device and put in evaluation mode.
        tokenizer: the model's tokenizer.
        batches: int64 tokens `(B, T + 1)` each, at least one.
        device: device to compute on.
        on_batch: called after each batch with the number of batches measured.

    Raises:
        DataError: the tokens stand for no text.
    """
    model.to(device.device).eval()
    nats, num_tokens, num_bytes = 0.0, 0, 0
    for done, batch in enumerate(batches, start=1):
        targets_BT = batch[:, 1:]
        tokens_BT = batch.to(device.device)
        with device.autocast():
            loss = models.loss_of(model, tokens_BT[:, :-1], tokens_BT[:, 1:])
        nats += float(loss) * targets_BT.numel()
        num_tokens += targets_BT.numel()
        num_bytes += sum(tokenizer.num_bytes(row) for row in targets_BT.tolist())
        on_batch(done)
    if not num_bytes:
        raise DataError("expected tokens of text to measure, got none; name another text")
    return Bits(
        bits_per_byte=nats / math.log(2) / num_bytes,
        loss=nats / num_tokens,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
    )
