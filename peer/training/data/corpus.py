"""The tokens of a run, split into training and validation, and each peer's stream of batches.

Batch `i` of peer `p` is a function of `(seed, p, i)`. Philox is a counter-based generator, so a
stream resumes from one number.

# B sequences, T positions, N tokens of a corpus
"""

import hashlib
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Self, cast

import numpy as np
import torch
from torch import Tensor

from atoll.peer.errors import DataError
from atoll.peer.training.data.documents import (
    Document,
    Found,
    TextDigest,
    goes_to_validation,
)
from atoll.peer.training.data.shards import TokenFiles
from atoll.peer.training.data.tokens import Tokenizer, Tokens

SPOOL_BYTES = 1 << 30  # more tokens than this move from memory to an unnamed temporary file


@dataclass(frozen=True, kw_only=True)
class TextSummary:
    """The text that was found for a run."""

    files: int
    """0 if the documents come from a data set"""
    documents: int
    num_bytes: int
    """of all documents, in UTF-8"""
    train_tokens: int
    valid_tokens: int
    sha256: str
    """digest of the documents (`atoll.peer.training.data.documents`), in hex; of a data set that of
    `atoll.peer.training.data.make_shards`"""
    not_read: str
    """binary files, named; empty if there are none"""


class TokenStream(ABC):
    """An endless stream of training batches for one peer."""

    @abstractmethod
    def next_batch(self) -> Tensor:
        """Return int64 tokens `(B, T + 1)`: the inputs and, shifted by one, the targets."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream as numbers and lists that JSON can hold."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where a stream with this state stopped.

        Raises:
            DataError: the state belongs to another kind of stream.
        """


class Corpus(ABC):
    """The text of a run, split into training and validation."""

    tokenizer: Tokenizer
    summary: TextSummary | None = None
    """The text that was found; None if it is streamed."""

    @abstractmethod
    def stream(self, *, seed: int, peer_id: str, batch_size: int, seq_len: int) -> TokenStream:
        """Return the training stream of one peer, from its beginning."""

    def num_rows(self, seq_len: int) -> int | None:
        """Return how many sequences the training text has that share no input; None if unknown."""
        return None

    def rows(self, numbers_B: np.ndarray[Any, Any], seq_len: int) -> Tensor:
        """Return rows by number, int64 `(B, T + 1)`, as `TokenStream.next_batch` does.

        Raises:
            DataError: they cannot be read by number.
        """
        raise DataError("the rows of a streamed data set have no numbers; write it as shards")

    @abstractmethod
    def validation(self, *, batches: int, batch_size: int, seq_len: int) -> list[Tensor]:
        """Return the same batches `(B, T + 1)` of validation text at every call."""


class _TokenSpool:
    """Collects the tokens of many documents, on disk if they are large."""

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
    """Text that is read and tokenised as a whole, or was before.

    Training draws sequences at random offsets, with replacement; a sequence may span documents.
    """

    def __init__(
        self,
        *,
        train_N: Tokens | TokenFiles,
        valid_N: Tokens | TokenFiles,
        tokenizer: Tokenizer,
        summary: TextSummary | None = None,
    ) -> None:
        self.train_N, self.valid_N, self.tokenizer = train_N, valid_N, tokenizer
        self.summary = summary

    @classmethod
    def read(
        cls,
        source: Iterable[Document],
        tokenizer: Tokenizer,
        *,
        valid_fraction: float,
        min_tokens: int,
        found: Found | None = None,
    ) -> Self:
        """Tokenise and split documents.

        Args:
            source: documents, in a fixed order.
            tokenizer: tokenizer of the run.
            valid_fraction: fraction of the documents for validation.
            min_tokens: tokens that each part needs. If the split by document leaves fewer, the
                corpus is cut at one offset instead.
            found: the files that the documents come from, once these have been read.

        Raises:
            DataError: there is not enough text for one sequence in each part.
        """
        end = np.array([] if tokenizer.end_token is None else [tokenizer.end_token])
        dtype = tokenizer.encode(b"").dtype
        digest, num_documents, num_bytes = TextDigest(), 0, 0
        with _TokenSpool(dtype) as train, _TokenSpool(dtype) as valid:
            for document in source:
                spool = valid if goes_to_validation(document.key, valid_fraction) else train
                spool.add(tokenizer.encode(document.data))
                spool.add(end.astype(dtype))
                digest.add(document)
                num_documents += 1
                num_bytes += len(document.data)
            train_N, valid_N = train.tokens(), valid.tokens()
        if min(len(train_N), len(valid_N)) < min_tokens:
            train_N, valid_N = _split_once(train_N, valid_N, valid_fraction, min_tokens)
        found = found or Found()
        summary = TextSummary(
            files=found.files,
            documents=num_documents,
            num_bytes=num_bytes,
            train_tokens=len(train_N),
            valid_tokens=len(valid_N),
            sha256=digest.hexdigest(),
            not_read=str(found),
        )
        return cls(train_N=train_N, valid_N=valid_N, tokenizer=tokenizer, summary=summary)

    def stream(self, *, seed: int, peer_id: str, batch_size: int, seq_len: int) -> TokenStream:
        """Return the training stream of one peer, from its beginning."""
        return _RandomWindows(self.train_N, stream_key(seed, peer_id), batch_size, seq_len)

    def num_rows(self, seq_len: int) -> int | None:
        """Return how many sequences the training text has; the rest behind the last is left out."""
        return (len(self.train_N) - 1) // seq_len

    def rows(self, numbers_B: np.ndarray[Any, Any], seq_len: int) -> Tensor:
        """Return rows by number; the last target of one is the first input of the next."""
        return _gather(self.train_N, numbers_B.astype(np.int64) * seq_len, seq_len)

    def validation(self, *, batches: int, batch_size: int, seq_len: int) -> list[Tensor]:
        """Return sequences spaced evenly over the validation text, `(B, T + 1)` each."""
        return even_windows(self.valid_N, batches, batch_size, seq_len)


def _split_once(
    train_N: Tokens, valid_N: Tokens, fraction: float, needed: int
) -> tuple[Tokens, Tokens]:
    all_N = np.concatenate([train_N, valid_N]) if len(valid_N) else train_N
    if not len(all_N):
        raise DataError("found no text; name a file or a folder that has some")
    if len(all_N) < 2 * needed:
        raise DataError(
            f"expected at least {2 * needed} tokens of text (one sequence of {needed} for training "
            f"and one for validation), got {len(all_N)}; add text or reduce seq_len"
        )
    cut = min(len(all_N) - max(needed, int(fraction * len(all_N))), len(all_N) - needed)
    cut = max(cut, needed)
    return all_N[:cut], all_N[cut:]


def even_windows(
    tokens_N: Tokens | TokenFiles, batches: int, batch_size: int, seq_len: int
) -> list[Tensor]:
    """Return batches `(B, T + 1)` of sequences spaced evenly over the tokens."""
    last = len(tokens_N) - (seq_len + 1)
    starts = np.linspace(0, last, batches * batch_size).astype(np.int64)
    return [
        _gather(tokens_N, starts[i : i + batch_size], seq_len)
        for i in range(0, len(starts), batch_size)
    ]


def _gather(tokens_N: Tokens | TokenFiles, starts_B: np.ndarray[Any, Any], seq_len: int) -> Tensor:
    places_BT = starts_B[:, None] + np.arange(seq_len + 1)
    return torch.from_numpy(tokens_N[places_BT].astype(np.int64))


def stream_key(seed: int, peer_id: str) -> int:
    """Return the 128-bit Philox key of a peer's stream."""
    digest = hashlib.sha256(f"{seed}/{peer_id}".encode()).digest()
    return int.from_bytes(digest[:16], "big")


class _RandomWindows(TokenStream):
    def __init__(
        self, tokens_N: Tokens | TokenFiles, key: int, batch_size: int, seq_len: int
    ) -> None:
        self._tokens_N, self._key = tokens_N, key
        self._batch_size, self._seq_len = batch_size, seq_len
        self._batches = 0

    def next_batch(self) -> Tensor:
        # Raw words, because NumPy guarantees only the bit generator's output across versions, not
        # that of Generator.integers.
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
    """Raise DataError unless `state` is of this kind of stream, with fields of these types."""
    if state.get("kind") != kind or any(type(state.get(k)) is not t for k, t in kinds.items()):
        raise DataError(
            f"expected the state of a {kind!r} stream with {', '.join(kinds)}, got {state!r}"
        )
