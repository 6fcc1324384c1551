"""The text of a run as tokens: split in two, and drawn in batches by a stream of each peer's own.

The batch number ``i`` of peer ``p`` is a function of ``(seed, p, i)``: Philox is a counter-based
generator, so a stream resumes from one number.

# B sequences, T positions, N tokens of a corpus
"""

import hashlib
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, Self, cast

import numpy as np
import torch
from torch import Tensor

from atoll.peer.errors import DataError
from atoll.peer.training.data.documents import Document, goes_to_validation
from atoll.peer.training.data.tokens import Tokenizer, Tokens

SPOOL_BYTES = 1 << 30  # tokens beyond this move from memory to an unnamed temporary file


class TokenStream(ABC):
    """An endless stream of training batches that belongs to one peer."""

    @abstractmethod
    def next_batch(self) -> Tensor:
        """Return int64 tokens of shape ``(B, T + 1)``: inputs and, shifted by one, targets."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain numbers and lists, fit for JSON."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the stream with this state stopped.

        Raises:
            DataError: the state is not one of this kind of stream.
        """


class Corpus(ABC):
    """The text of a run, split in two."""

    tokenizer: Tokenizer

    @abstractmethod
    def stream(self, *, seed: int, peer_id: str, batch_size: int, seq_len: int) -> TokenStream:
        """Return the training stream of one peer, from its beginning."""

    @abstractmethod
    def validation(self, *, batches: int, batch_size: int, seq_len: int) -> list[Tensor]:
        """Return the same batches ``(B, T + 1)`` of validation text at every call."""


class _TokenSpool:
    """Collects the tokens of many documents; large ones rest on disk."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._file = tempfile.SpooledTemporaryFile(SPOOL_BYTES)
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, tokens: Tokens) -> None:
        self._bytes += self._file.write(tokens.tobytes())

    def tokens(self) -> Tokens:
        self._file.seek(0)
        if self._bytes <= SPOOL_BYTES:
            return np.frombuffer(self._file.read(), dtype=self._dtype)
        self._file.flush()
        return np.memmap(cast(BinaryIO, self._file), dtype=self._dtype, mode="r")


class LocalCorpus(Corpus):
    """Text that was read and tokenised as a whole.

    Training draws windows at random places, with replacement; windows may span documents.
    """

    def __init__(self, *, train_N: Tokens, valid_N: Tokens, tokenizer: Tokenizer) -> None:
        """Take the tokens of both parts."""
        self.train_N, self.valid_N, self.tokenizer = train_N, valid_N, tokenizer

    @classmethod
    def read(
        cls,
        source: Iterable[Document],
        tokenizer: Tokenizer,
        *,
        valid_fraction: float,
        min_tokens: int,
    ) -> Self:
        """Tokenise and split documents.

        Args:
            source: the documents in order.
            tokenizer: of the run.
            valid_fraction: the share of the documents that is kept for validation.
            min_tokens: needed in each part; when the split by document leaves less, the corpus is
                split at one place instead.

        Raises:
            DataError: there is not enough text for one window in each part.
        """
        end = np.array([] if tokenizer.end_token is None else [tokenizer.end_token])
        dtype = tokenizer.encode(b"").dtype
        with _TokenSpool(dtype) as train, _TokenSpool(dtype) as valid:
            for document in source:
                spool = valid if goes_to_validation(document.key, valid_fraction) else train
                spool.add(tokenizer.encode(document.data))
                spool.add(end.astype(dtype))
            train_N, valid_N = train.tokens(), valid.tokens()
        if min(len(train_N), len(valid_N)) < min_tokens:
            train_N, valid_N = _split_once(train_N, valid_N, valid_fraction, min_tokens)
        return cls(train_N=train_N, valid_N=valid_N, tokenizer=tokenizer)

    def stream(self, *, seed: int, peer_id: str, batch_size: int, seq_len: int) -> TokenStream:
        """Return the training stream of one peer, from its beginning."""
        return _RandomWindows(self.train_N, stream_key(seed, peer_id), batch_size, seq_len)

    def validation(self, *, batches: int, batch_size: int, seq_len: int) -> list[Tensor]:
        """Return windows that lie evenly over the validation text."""
        return even_windows(self.valid_N, batches, batch_size, seq_len)


def _split_once(
    train_N: Tokens, valid_N: Tokens, fraction: float, needed: int
) -> tuple[Tokens, Tokens]:
    all_N = np.concatenate([train_N, valid_N]) if len(valid_N) else train_N
    if len(all_N) < 2 * needed:
        raise DataError(
            f"expected at least {2 * needed} tokens of text (one window of {needed} for training "
            f"and one for validation), got {len(all_N)}; add text (files with zero bytes count as "
            "binary and are left out) or shorten seq_len"
        )
    cut = min(len(all_N) - max(needed, int(fraction * len(all_N))), len(all_N) - needed)
    cut = max(cut, needed)
    return all_N[:cut], all_N[cut:]


def even_windows(tokens_N: Tokens, batches: int, batch_size: int, seq_len: int) -> list[Tensor]:
    """Batches ``(B, T + 1)`` that lie evenly over the tokens."""
    last = len(tokens_N) - (seq_len + 1)
    starts = np.linspace(0, last, batches * batch_size).astype(np.int64)
    return [
        _gather(tokens_N, starts[i : i + batch_size], seq_len)
        for i in range(0, len(starts), batch_size)
    ]


def _gather(tokens_N: Tokens, starts_B: np.ndarray[Any, Any], seq_len: int) -> Tensor:
    places_BT = starts_B[:, None] + np.arange(seq_len + 1)
    return torch.from_numpy(tokens_N[places_BT].astype(np.int64))


def stream_key(seed: int, peer_id: str) -> int:
    """128 bits that make a peer's stream its own."""
    digest = hashlib.sha256(f"{seed}/{peer_id}".encode()).digest()
    return int.from_bytes(digest[:16], "big")


class _RandomWindows(TokenStream):
    def __init__(self, tokens_N: Tokens, key: int, batch_size: int, seq_len: int) -> None:
        self._tokens_N, self._key = tokens_N, key
        self._batch_size, self._seq_len = batch_size, seq_len
        self._batches = 0

    def next_batch(self) -> Tensor:
        # Raw words, not Generator.integers: only the bit generator's output is promised for ever.
        generator = np.random.Philox(key=self._key, counter=[0, self._batches, 0, 0])
        words_B = np.asarray(generator.random_raw(self._batch_size), dtype=np.uint64)
        places = np.uint64(len(self._tokens_N) - self._seq_len)
        self._batches += 1
        return _gather(self._tokens_N, (words_B % places).astype(np.int64), self._seq_len)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "windows", "batches": self._batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, "windows", batches=int)
        self._batches = state["batches"]


def check_state(state: Mapping[str, Any], kind: str, **kinds: type) -> None:
    """DataError unless this is the state of a stream of that kind, with fields of these types."""
    if state.get("kind") != kind or any(type(state.get(k)) is not t for k, t in kinds.items()):
        raise DataError(
            f"expected the state of a {kind!r} stream with {', '.join(kinds)}, got {state!r}"
        )
