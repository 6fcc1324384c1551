"""Stream a Hugging Face data set: `hf:NAME` or `hf:NAME@CONFIG`, while training or to shards.

A stream resumes from the data set's own state and the remaining tokens of the last document.

# B sequences, T positions, N tokens of a corpus
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from atoll.peer.errors import DataError
from atoll.peer.extras import extra
from atoll.peer.training.data.corpus import (
    Corpus,
    TokenStream,
    check_state,
    even_windows,
    stream_key,
)
from atoll.peer.training.data.documents import (
    expect_no_arrow,
    goes_to_validation,
    text_of,
)
from atoll.peer.training.data.tokens import Tokenizer, Tokens

HUB = "hf:"
HUB_TIMEOUT_S = 10.0  # at the start of a coordinator, which does without
HUB_OFFSET_DOCUMENTS = 10_000  # limit of a peer's first document; skipping so many takes seconds
HUB_VALIDATION_DOCUMENTS = 2_000  # searched for validation text; about 5% of them are


class HubCorpus(Corpus):
    """A Hugging Face data set that is streamed while training (needs the `data` extra).

    Each peer shuffles the shards in its own order, starts at its own document (because a data set
    may have only one shard) and packs documents into sequences one after another. A hash of the
    text selects validation documents, which no training stream contains.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        *,
        text_field: str,
        valid_fraction: float,
        split: str = "train",
        revision: str | None = None,
        public: bool = False,
    ) -> None:
        """Open the data set `NAME` or `NAME@CONFIG`.

        Args:
            name: name of the data set.
            tokenizer: tokenizer of the run.
            text_field: field of the text.
            valid_fraction: fraction of the documents for validation.
            split: split of the data set.
            revision: commit, branch or tag on the hub; None for the newest.
            public: do not use the owner's login.

        Raises:
            DataError: the extra is not installed, or the data set cannot be opened or names files
                outside of the hub.
        """
        module = extra("datasets", f"the data source 'hf:{name}'")
        path, _, config = name.partition("@")
        module.config.HF_DATASETS_TRUST_REMOTE_CODE = False  # old versions ask, or run a script
        is_folder = Path(path).exists()  # which the owner named
        if is_folder:
            expect_no_arrow(Path(path))
        fixed = {} if is_folder or revision is None else {"revision": revision}
        try:
            builder = module.load_dataset_builder(
                path, config or None, token=False if public else None, **fixed
            )
            if not is_folder:
                _expect_own_files(path, builder.config.data_files or {})
            self._dataset = builder.as_streaming_dataset(split=split)
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"cannot open the data set {name!r}: {error}") from error
        self._name, self._text_field, self._valid_fraction = name, text_field, valid_fraction
        self.tokenizer = tokenizer

    def stream(self, *, seed: int, peer_id: str, batch_size: int, seq_len: int) -> TokenStream:
        """Return the training stream of one peer, from its beginning."""
        documents = _HubDocuments(
            self._dataset, self._training_tokens, stream_key(seed, peer_id), self._name
        )
        return _PackedDocuments(documents, batch_size, seq_len)

    def validation(self, *, batches: int, batch_size: int, seq_len: int) -> list[Tensor]:
        """Return sequences of the first validation documents, `(B, T + 1)` each.

        Raises:
            DataError: the first documents hold too little validation text.
        """
        head = map(self._text, self._dataset.take(HUB_VALIDATION_DOCUMENTS))
        found = [self.tokens_of(text) for text in head if self._is_validation(text)]
        tokens_N = np.concatenate(found) if found else np.zeros(0, dtype=np.uint8)
        if len(tokens_N) <= seq_len:
            raise DataError(
                f"expected more than {seq_len} validation tokens in the first "
                f"{HUB_VALIDATION_DOCUMENTS} documents of {self._name!r}, got {len(tokens_N)}; "
                "raise valid_fraction"
            )
        return even_windows(tokens_N, batches, batch_size, seq_len)

    def in_order(self, place: Mapping[str, Any] | None = None) -> TextsInOrder:
        """Return all texts in the data set's order, or those behind a place in it."""
        return TextsInOrder(self._dataset, place, self._text)

    def part_of(self, text: str, number: int) -> Literal["train", "valid"] | None:
        """Return the part of a text, as streams and `validation` have it; None if in neither.

        Args:
            text: of a document.
            number: of the document, from 0, in the data set's order.
        """
        if not self._is_validation(text):
            return "train"
        return "valid" if number < HUB_VALIDATION_DOCUMENTS else None

    def _text(self, record: Mapping[str, object]) -> str:
        return text_of(record, self._text_field, f"hf:{self._name}")

    def _is_validation(self, text: str) -> bool:
        return goes_to_validation(text, self._valid_fraction)

    def _training_tokens(self, record: Mapping[str, object]) -> Tokens | None:
        text = self._text(record)
        return None if self._is_validation(text) else self.tokens_of(text)

    def tokens_of(self, text: str) -> Tokens:
        """Return the tokens of a document, with that of its end."""
        tokens = self.tokenizer.encode(text.encode(errors="replace"))
        end = [] if self.tokenizer.end_token is None else [self.tokenizer.end_token]
        return np.concatenate([tokens, np.array(end, dtype=tokens.dtype)])


def newest_revision(name: str) -> str:
    """Ask the hub for the newest commit of the data set `NAME` or `NAME@CONFIG`.

    Raises:
        DataError: the hub does not answer, or has no such data set.
        ExtraMissing: the extra is not installed.
    """
    hub = extra("huggingface_hub", f"the data source 'hf:{name}'")
    try:
        info = hub.HfApi().dataset_info(name.partition("@")[0], timeout=HUB_TIMEOUT_S)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"the hub does not give the revision of {name!r}: {reason}") from error
    return str(info.sha)


def _expect_own_files(name: str, files: Mapping[str, Iterable[str]]) -> None:
    """Check that a data set consists of its own files on the hub.

    Its description there may name any path, which `datasets` then reads on this machine, any URL,
    which may lead into this machine's own network, and what the owner's login can read. A file
    within an archive is written `zip://FILE::ARCHIVE`, so the place comes last.

    Raises:
        DataError: it has other files, or none.
    """
    own = f"hf://datasets/{name}@".lower()
    names = [str(file) for split in files.values() for file in split]
    others = [file for file in names if not file.rpartition("::")[2].lower().startswith(own)]
    if others or not names:
        raise DataError(
            f"expected files of its own on the Hugging Face hub in the data set {name!r}, got "
            f"{others[0] if others else 'none'!r}; use another data set, or name this machine's "
            "copy with --data"
        )


class TextsInOrder:
    """The texts of a data set, which continue at a saved place."""

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401 - an optional package
        place: Mapping[str, Any] | None,
        text_of: Callable[[Mapping[str, object]], str],
    ) -> None:
        self._dataset, self._text_of = dataset, text_of
        if place is not None:
            dataset.load_state_dict(dict(place))

    def __iter__(self) -> Iterator[str]:
        """Yield text after text.

        Raises:
            DataError: the data set cannot be read further, or a document has no text.
        """
        records = iter(self._dataset)
        while (record := self._next(records)) is not None:
            yield self._text_of(record)

    @property
    def place(self) -> dict[str, Any]:
        """The place behind the last text, as JSON can hold it."""
        place: dict[str, Any] = self._dataset.state_dict()
        return place

    def _next(self, records: Iterator[Mapping[str, object]]) -> Mapping[str, object] | None:
        try:
            return next(records, None)
        except Exception as error:  # whatever `datasets` and the network may raise
            raise DataError(f"the data set cannot be read further: {error}") from error


class _HubDocuments:
    """Yields the training documents of a data set for one peer, pass after pass."""

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401 - an optional package
        tokens_of: Callable[[Mapping[str, object]], Tokens | None],
        key: int,
        name: str,
    ) -> None:
        self._dataset, self._tokens_of, self._name = dataset, tokens_of, name
        self._key = key
        self._open(number=0, state=None)
        self._skip = key % HUB_OFFSET_DOCUMENTS
        self._yielded = True

    def next(self) -> Tokens:
        while True:
            record = next(self._records, None)
            if record is None:
                self._start_again()
                continue
            self._seen += 1
            if self._skip:
                self._skip -= 1
            elif (tokens := self._tokens_of(record)) is not None:
                self._yielded = True
                return tokens

    def state_dict(self) -> dict[str, Any]:
        return {
            "pass": self._pass,
            "seen": self._seen,
            "skip": self._skip,
            "yielded": self._yielded,
            "source": self._source.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._open(number=state["pass"], state=state["source"])
        self._seen, self._skip = state["seen"], state["skip"]
        self._yielded = state["yielded"]

    def _open(self, *, number: int, state: Mapping[str, Any] | None) -> None:
        order = (self._key + number) % 2**32
        self._source = self._dataset.shuffle(seed=order, buffer_size=1)  # shards; resumes exactly
        if state is not None:
            self._source.load_state_dict(dict(state))
        self._records: Iterator[Mapping[str, object]] = iter(self._source)
        self._pass, self._seen = number, 0

    def _start_again(self) -> None:
        if self._seen == 0 or not self._yielded:
            raise DataError(f"the data set {self._name!r} holds no training documents")
        self._skip %= self._seen
        self._yielded = self._skip > 0
        self._open(number=self._pass + 1, state=None)


class _PackedDocuments(TokenStream):
    """Cuts a stream of documents into sequences."""

    def __init__(self, documents: _HubDocuments, batch_size: int, seq_len: int) -> None:
        self._documents = documents
        self._batch_size, self._seq_len = batch_size, seq_len
        self._left_over: Tokens = np.zeros(0, dtype=np.int64)

    def next_batch(self) -> Tensor:
        needed = self._batch_size * (self._seq_len + 1)
        pieces, length = [self._left_over], len(self._left_over)
        while length < needed:
            pieces.append(self._documents.next())
            length += len(pieces[-1])
        tokens_N = np.concatenate(pieces).astype(np.int64)
        self._left_over = tokens_N[needed:]
        return torch.from_numpy(tokens_N[:needed].reshape(self._batch_size, -1))

    def state_dict(self) -> dict[str, Any]:
        documents = self._documents.state_dict()
        return {
            "kind": "documents",
            "documents": documents,
            "left_over": self._left_over.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, "documents", documents=dict, left_over=list)
        self._documents.load_state_dict(state["documents"])
        self._left_over = np.array(state["left_over"], dtype=np.int64)
