"""Write the text of a run as shards.

A data set of Hugging Face is copied document by document. While that lasts, `unfinished.json` in
the folder has the place that was reached, and the next call continues there. Its validation text is
that of peers that stream the data set; validation documents behind it are left out, so that nobody
trains on them.

The digest of a data set is that of its documents in order, and follows from the one before and the
next document's text alone, as a copy that continues needs it::

    digest = SHA-256(digest before, or nothing | SHA-256(text))
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from atoll.coordinator.run.spec import RunSpec
from atoll.peer.errors import DataError
from atoll.peer.training.data.corpus import LocalCorpus, TextSummary
from atoll.peer.training.data.hub import HUB, HUB_VALIDATION_DOCUMENTS, HubCorpus, newest_revision
from atoll.peer.training.data.load import open_corpus
from atoll.peer.training.data.shards import (
    PartWriter,
    expect_no_shards,
    put_json,
    write_header,
    write_shards,
)
from atoll.peer.training.data.tokens import BYTES
from atoll.peer.training.digests import read_tokenizer

UNFINISHED = "unfinished.json"
SAVE_TOKENS = 1 << 24  # between two saved places: some 20 s in one thread

Tell = Callable[["Copied"], None]


@dataclass(kw_only=True)
class Copied:
    """The state of a data set's copy."""

    made_of: dict[str, Any]
    """What decides the tokens; a copy continues only if all of it is equal."""
    documents: int = 0
    num_bytes: int = 0
    sha256: str = ""
    train_tokens: int = 0
    valid_tokens: int = 0
    place: dict[str, Any] | None = field(default=None, repr=False)
    """of the stream of `datasets`"""

    def add(self, text: bytes) -> None:
        """Count a document."""
        self.documents += 1
        self.num_bytes += len(text)
        before = bytes.fromhex(self.sha256)
        self.sha256 = hashlib.sha256(before + hashlib.sha256(text).digest()).hexdigest()


def make_shards(spec: RunSpec, folder: Path, *, tell: Tell = lambda copied: None) -> TextSummary:
    """Tokenise the text of a run, split it as the run does, and write it to a folder.

    Args:
        spec: the run, with this machine's files; everything that it names is read.
        folder: made if missing; it must not hold shards.
        tell: called with the place of a data set's copy, when it begins and now and then.

    Returns:
        The text that was found.

    Raises:
        DataError: the text or the tokenizer is not usable.
        OSError: a file cannot be written.
    """
    expect_no_shards(folder)
    data = spec.data
    made_of = _made_of(spec)
    copied = _unfinished(folder, made_of)
    if copied is None:
        if is_streamed(spec):
            made_of["revision"] = data.revision or _newest(data.source.removeprefix(HUB))
        copied = Copied(made_of=made_of)
    corpus = open_corpus(
        data.source,
        format=data.format,
        tokenizer=data.tokenizer,
        tokenizer_sha256=data.tokenizer_sha256,
        text_field=data.text_field,
        valid_fraction=data.valid_fraction,
        split=data.split,
        revision=copied.made_of["revision"],
        seq_len=data.seq_len,
    )
    if isinstance(corpus, HubCorpus):
        return _HubCopy(corpus, folder, copied, min_tokens=data.seq_len + 1).run(tell)
    assert isinstance(corpus, LocalCorpus) and corpus.summary is not None, "it is read as a whole"
    write_shards(
        folder,
        train=corpus.train_N,
        valid=corpus.valid_N,
        vocab_size=corpus.tokenizer.vocab_size,
        text=asdict(corpus.summary),
    )
    return corpus.summary


class _HubCopy:
    """Copies a data set to shards, and saves its place."""

    def __init__(
        self,
        corpus: HubCorpus,
        folder: Path,
        copied: Copied,
        *,
        min_tokens: int,
    ) -> None:
        self._corpus, self._folder, self._copied = corpus, folder, copied
        self._min_tokens = min_tokens
        folder.mkdir(parents=True, exist_ok=True)
        vocab_size = corpus.tokenizer.vocab_size
        self._train, self._valid = (
            PartWriter(folder, part, vocab_size=vocab_size, num_tokens=tokens)
            for part, tokens in (("train", copied.train_tokens), ("valid", copied.valid_tokens))
        )

    def run(self, tell: Tell) -> TextSummary:
        copied, texts = self._copied, self._corpus.in_order(self._copied.place)
        tell(copied)
        saved = self._num_tokens()
        for text in texts:
            if part := self._corpus.part_of(text, copied.documents):
                writer = self._train if part == "train" else self._valid
                writer.append(self._corpus.tokens_of(text))
            copied.add(text.encode(errors="replace"))
            if copied.documents == HUB_VALIDATION_DOCUMENTS:
                self._expect_tokens(self._valid, "validation", "raise valid_fraction")
            if self._num_tokens() - saved >= SAVE_TOKENS:
                saved = self._num_tokens()
                self._save(texts.place)
                tell(copied)
        self._expect_tokens(self._valid, "validation", "raise valid_fraction")
        self._expect_tokens(self._train, "training", "lower valid_fraction")
        return self._finish()

    def _num_tokens(self) -> int:
        return self._train.num_tokens + self._valid.num_tokens

    def _expect_tokens(self, part: PartWriter, name: str, remedy: str) -> None:
        if part.num_tokens < self._min_tokens:
            self._forget()
            raise DataError(
                f"expected at least {self._min_tokens} {name} tokens in the data set, whose "
                f"validation text is among its first {HUB_VALIDATION_DOCUMENTS:,} documents, got "
                f"{part.num_tokens}; {remedy}, or reduce seq_len"
            )

    def _save(self, place: dict[str, Any]) -> None:
        copied = self._copied
        self._train.flush()
        self._valid.flush()
        copied.train_tokens, copied.valid_tokens = self._train.num_tokens, self._valid.num_tokens
        copied.place = place
        put_json(self._folder / UNFINISHED, asdict(copied))

    def _finish(self) -> TextSummary:
        summary = TextSummary(
            files=0,
            documents=self._copied.documents,
            num_bytes=self._copied.num_bytes,
            train_tokens=self._train.num_tokens,
            valid_tokens=self._valid.num_tokens,
            sha256=self._copied.sha256,
            not_read="",
        )
        write_header(
            self._folder,
            self._train,
            self._valid,
            vocab_size=self._corpus.tokenizer.vocab_size,
            text=asdict(summary) | self._copied.made_of,
        )
        self._forget()
        return summary

    def _forget(self) -> None:
        (self._folder / UNFINISHED).unlink(missing_ok=True)


def is_streamed(spec: RunSpec) -> bool:
    """Return whether a run's text is a data set of Hugging Face."""
    return spec.data.source.startswith(HUB) or spec.data.format == "hf"


def _made_of(spec: RunSpec) -> dict[str, Any]:
    """Return what decides the tokens of a data set.

    Raises:
        DataError: the tokenizer cannot be read.
    """
    data, tokenizer = spec.data, BYTES
    if data.tokenizer != BYTES:
        tokenizer = hashlib.sha256(read_tokenizer(spec)).hexdigest()
    return {
        "source": HUB * is_streamed(spec) + data.source.removeprefix(HUB),
        "split": data.split,
        "revision": data.revision,
        "text_field": data.text_field,
        "valid_fraction": data.valid_fraction,
        "tokenizer": tokenizer,
    }


def _newest(name: str) -> str | None:
    """Return the revision of a data set that is the newest now; None for a folder."""
    is_folder = Path(name.partition("@")[0]).exists()
    return None if is_folder else newest_revision(name)


def _unfinished(folder: Path, made_of: dict[str, Any]) -> Copied | None:
    """Return how far a copy in the folder has come; None if there is none.

    Raises:
        DataError: it is of another text, or damaged.
    """
    path = folder / UNFINISHED
    if not path.exists():
        return None
    try:
        copied = Copied(**json.loads(path.read_text(encoding="utf-8")))
        before = dict(copied.made_of)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); {_REMEDY}") from None
    if made_of["revision"] is None:  # that of the first call
        made_of = made_of | {"revision": before.get("revision")}
    for name, value in made_of.items():
        if before.get(name) != value:
            raise DataError(
                f"{folder} holds an unfinished copy of another text: expected {name} {value!r}, "
                f"got {before.get(name)!r}; {_REMEDY}"
            )
    return copied


_REMEDY = "choose another folder, or remove this one to begin again"
