"""Text in, batches of tokens out; every peer draws its own stream and can resume it exactly.

Sources, by the ``source`` of a run and its ``format`` (``auto`` looks at the name):

    stdlib      the Python standard library's own source, without tests and generated tables
    a file      text, ``.jsonl`` (one object a line, the text in ``text_field``), ``.parquet``
    a folder    the text, jsonl and parquet files under it, hidden ones left out
    hf:NAME     a Hugging Face data set in streaming mode; ``hf:NAME@CONFIG`` for one of its parts
                (or the bare name with the format ``hf``)

Tokens are bytes (a zero byte ends a document), or those of a ``tokenizers`` JSON file (its end
token, if it has one, ends a document). A document goes to validation when a hash of its name says
so, so the split is the same on every machine; a corpus of too few documents gives its tail instead.

The batch number ``i`` of peer ``p`` is a function of ``(seed, p, i)``: Philox is a counter-based
generator, so a stream resumes from one number. A streamed data set resumes from its own state and
the tokens left over.

# B sequences, T positions, N tokens of a corpus
"""

import hashlib
import importlib
import json
import sysconfig
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Protocol, Self, cast

import numpy as np
import torch
from torch import Tensor

from atoll.peer.errors import DataError

Tokens = np.ndarray[Any, np.dtype[Any]]

STDLIB = "stdlib"
HUB = "hf:"
NOT_SOURCE = frozenset({"site-packages", "dist-packages", "__pycache__"})
TESTS = frozenset({"test", "tests", "idle_test"})  # would be more than half of the text
GENERATED = frozenset({"encodings", "pydoc_data"})  # tables of numbers and one 757 kB string
SKIPPED_FOLDERS = NOT_SOURCE | TESTS | GENERATED
FORMATS = ("auto", "text", "jsonl", "parquet", "hf")
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
SPOOL_BYTES = 1 << 30  # tokens beyond this move from memory to an unnamed temporary file
HUB_OFFSET_DOCUMENTS = 10_000  # peers start so far apart at most; seconds to skip
HUB_VALIDATION_DOCUMENTS = 2_000  # looked at in search of validation text; about 5% are


# --- tokenizers


class TextDecoder(Protocol):
    """Turns tokens into text one at a time."""

    def feed(self, token: int) -> str:
        """Return the text that ``token`` completes, often a character, sometimes nothing."""
        ...


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""
        ...

    @property
    def end_token(self) -> int | None:
        """The token that ends a document."""
        ...

    def encode(self, data: bytes) -> Tokens:
        """Return the tokens of UTF-8 text, without an end token."""
        ...

    def decoder(self) -> TextDecoder:
        """Return a fresh decoder."""
        ...


class ByteTokenizer:
    """256 tokens, one per byte."""

    vocab_size = 256
    end_token = 0  # no text file holds a zero byte

    def encode(self, data: bytes) -> Tokens:
        """Return the bytes themselves, as uint8."""
        return np.frombuffer(data, dtype=np.uint8)

    def decoder(self) -> TextDecoder:
        """Return a decoder that waits for the rest of a character."""
        return _ByteDecoder()


class _ByteDecoder:
    def __init__(self) -> None:
        self._pending = b""

    def feed(self, token: int) -> str:
        self._pending += bytes([token])
        try:
            text = self._pending.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            text = self._pending.decode(errors="replace")
        self._pending = b""
        return text


class JsonTokenizer:
    """A ``tokenizers`` JSON file (needs the ``data`` extra)."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            DataError: the extra is not installed, or the file is missing or not a tokenizer.
        """
        module = _extra("tokenizers", f"the tokenizer {str(path)!r}")
        try:
            self._tokenizer = module.Tokenizer.from_file(str(path))
        except Exception as error:
            raise DataError(
                f"expected 'bytes' or a tokenizers JSON file, got {str(path)!r} ({error})"
            ) from error
        self._new_stream = _extra("tokenizers.decoders", "decoding").DecodeStream
        known = map(self._tokenizer.token_to_id, END_TOKENS)
        self.end_token: int | None = next((i for i in known if i is not None), None)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, data: bytes) -> Tokens:
        """Return the tokens, as uint16 where they fit; bytes that are not UTF-8 are replaced."""
        text = data.decode(errors="replace")
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.asarray(tokens, dtype=np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def decoder(self) -> TextDecoder:
        """Return a decoder that waits for the rest of a character."""
        return _JsonDecoder(self._tokenizer, self._new_stream(skip_special_tokens=True))


class _JsonDecoder:
    def __init__(self, tokenizer: Any, stream: Any) -> None:  # noqa: ANN401 - an optional package
        self._tokenizer, self._stream = tokenizer, stream

    def feed(self, token: int) -> str:
        return self._stream.step(self._tokenizer, token) or ""


def open_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a run: ``"bytes"``, or the path of a ``tokenizers`` JSON file.

    Raises:
        DataError: as `JsonTokenizer` does.
    """
    return ByteTokenizer() if name == "bytes" else JsonTokenizer(Path(name).expanduser())


def _extra(name: str, purpose: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise DataError(
            f"{purpose} needs the package {package!r}, which is not installed; "
            'install it with: pip install "atoll[data]"'
        ) from error


# --- documents


@dataclass(frozen=True, kw_only=True)
class Document:
    """One piece of text."""

    key: str
    """Its name in the corpus, the same on every machine; decides the split."""
    data: bytes
    """UTF-8."""


def documents(source: str, *, format: str = "auto", text_field: str = "text") -> Iterator[Document]:
    """Yield the documents of a local source in a fixed order.

    Args:
        source: ``"stdlib"``, or the path of a file or folder.
        format: one of `FORMATS`; ``auto`` goes by the suffix of each file.
        text_field: the field or column that holds the text of jsonl and parquet files.

    Raises:
        DataError: nothing there, an unknown format, or a record without the text.
    """
    if format not in FORMATS:
        raise DataError(f"unknown data format {format!r}; expected one of {', '.join(FORMATS)}")
    if source == STDLIB:
        yield from _stdlib_documents()
        return
    path = Path(source).expanduser()
    if not path.exists():
        raise DataError(
            f"data source {source!r} does not exist; expected 'stdlib', a file, a folder or hf:NAME"
        )
    for file in [path] if path.is_file() else _visible_files(path):
        name = file.name if path.is_file() else file.relative_to(path).as_posix()
        yield from _reader(file, format)(file, name, text_field)


def _stdlib_documents() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        (name.as_posix(), file)
        for file in root.rglob("*.py")
        if SKIPPED_FOLDERS.isdisjoint((name := file.relative_to(root)).parts[:-1])
    )
    if not files:
        raise DataError(
            f"this Python keeps no source of its standard library in {root}; "
            "name a text file or a folder as the data source"
        )
    for key, file in files:
        yield Document(key=key, data=file.read_bytes())


def _visible_files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


Reader = Callable[[Path, str, str], Iterator[Document]]


def _reader(file: Path, format: str) -> Reader:
    if format == "auto":
        format = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}.get(
            file.suffix.lower(), "text"
        )
    readers: dict[str, Reader] = {
        "text": _read_text,
        "jsonl": _read_jsonl,
        "parquet": _read_parquet,
    }
    return readers[format]


def _read_text(file: Path, name: str, text_field: str) -> Iterator[Document]:
    data = file.read_bytes()
    if b"\0" not in data[:8192]:  # a zero byte marks a binary file; git looks as far
        yield Document(key=name, data=data)


def _read_jsonl(file: Path, name: str, text_field: str) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                text = _json_text(line, text_field, f"{file}, line {number}")
                yield Document(key=f"{name}:{number}", data=text.encode(errors="replace"))


def _json_text(line: bytes, text_field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: expected a JSON object, got {line[:40]!r} ({error})") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(record).__name__}")
    return _text_of(record, text_field, where)


def _text_of(record: Mapping[str, object], text_field: str, where: str) -> str:
    text = record.get(text_field)
    if not isinstance(text, str):
        raise DataError(
            f"{where}: expected text in the field {text_field!r}, got fields "
            f"{', '.join(map(str, record))}; set text_field of [data]"
        )
    return text


def _read_parquet(file: Path, name: str, text_field: str) -> Iterator[Document]:
    parquet = _extra("pyarrow.parquet", f"the parquet file {str(file)!r}")
    try:
        table = parquet.ParquetFile(file)
    except Exception as error:
        raise DataError(f"{file}: expected a parquet file: {error}") from error
    with table:
        columns = table.schema_arrow.names
        if text_field not in columns:
            raise DataError(
                f"{file}: expected a column {text_field!r}, got {', '.join(columns)}; "
                "set text_field of [data]"
            )
        batches = table.iter_batches(columns=[text_field])
        texts = (text for batch in batches for text in batch.column(0).to_pylist())
        for number, text in enumerate(texts):
            record = _text_of({text_field: text}, text_field, f"{file}, row {number}")
            yield Document(key=f"{name}:{number}", data=record.encode(errors="replace"))


def goes_to_validation(key: str, fraction: float) -> bool:
    """Whether the document named ``key`` is validation text; decided by a hash of the name."""
    digest = hashlib.sha256(key.encode(errors="replace")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


# --- corpora


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
        return _RandomWindows(self.train_N, _stream_key(seed, peer_id), batch_size, seq_len)

    def validation(self, *, batches: int, batch_size: int, seq_len: int) -> list[Tensor]:
        """Return windows that lie evenly over the validation text."""
        return _even_windows(self.valid_N, batches, batch_size, seq_len)


def _split_once(
    train_N: Tokens, valid_N: Tokens, fraction: float, needed: int
) -> tuple[Tokens, Tokens]:
    all_N = np.concatenate([train_N, valid_N]) if len(valid_N) else train_N
    if len(all_N) < 2 * needed:
        raise DataError(
            f"expected at least {2 * needed} tokens of text (one window of {needed} for training "
            f"and one for validation), got {len(all_N)}; add text or shorten seq_len"
        )
    cut = min(len(all_N) - max(needed, int(fraction * len(all_N))), len(all_N) - needed)
    cut = max(cut, needed)
    return all_N[:cut], all_N[cut:]


def _even_windows(tokens_N: Tokens, batches: int, batch_size: int, seq_len: int) -> list[Tensor]:
    last = len(tokens_N) - (seq_len + 1)
    starts = np.linspace(0, last, batches * batch_size).astype(np.int64)
    return [
        _gather(tokens_N, starts[i : i + batch_size], seq_len)
        for i in range(0, len(starts), batch_size)
    ]


def _gather(tokens_N: Tokens, starts_B: np.ndarray[Any, Any], seq_len: int) -> Tensor:
    places_BT = starts_B[:, None] + np.arange(seq_len + 1)
    return torch.from_numpy(tokens_N[places_BT].astype(np.int64))


def _stream_key(seed: int, peer_id: str) -> int:
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
        _check_state(state, "windows", batches=int)
        self._batches = state["batches"]


def _check_state(state: Mapping[str, Any], kind: str, **kinds: type) -> None:
    if state.get("kind") != kind or any(type(state.get(k)) is not t for k, t in kinds.items()):
        raise DataError(
            f"expected the state of a {kind!r} stream with {', '.join(kinds)}, got {state!r}"
        )


class HubCorpus(Corpus):
    """A Hugging Face data set that is read while training (needs the ``data`` extra).

    Each peer shuffles the shards in its own way, starts at a document of its own (a data set may
    have one shard only) and packs documents into sequences one after another. Validation
    documents, by a hash of their text, are left out of every training stream.
    """

    def __init__(
        self, name: str, tokenizer: Tokenizer, *, text_field: str, valid_fraction: float
    ) -> None:
        """Open the data set ``NAME`` or ``NAME@CONFIG``, split ``train``.

        Raises:
            DataError: the extra is not installed, or the data set cannot be opened.
        """
        module = _extra("datasets", f"the data source 'hf:{name}'")
        path, _, config = name.partition("@")
        try:
            self._dataset = module.load_dataset(path, config or None, split="train", streaming=True)
        except Exception as error:
            raise DataError(f"cannot open the data set {name!r}: {error}") from error
        self._name, self._text_field, self._valid_fraction = name, text_field, valid_fraction
        self.tokenizer = tokenizer

    def stream(self, *, seed: int, peer_id: str, batch_size: int, seq_len: int) -> TokenStream:
        """Return the training stream of one peer, from its beginning."""
        documents = _HubDocuments(
            self._dataset, self._training_tokens, _stream_key(seed, peer_id), self._name
        )
        return _PackedDocuments(documents, batch_size, seq_len)

    def validation(self, *, batches: int, batch_size: int, seq_len: int) -> list[Tensor]:
        """Return windows of the first validation documents of the data set.

        Raises:
            DataError: the first documents hold too little validation text.
        """
        head = map(self._text, self._dataset.take(HUB_VALIDATION_DOCUMENTS))
        found = [self._tokens(text) for text in head if self._is_validation(text)]
        tokens_N = np.concatenate(found) if found else np.zeros(0, dtype=np.uint8)
        if len(tokens_N) <= seq_len:
            raise DataError(
                f"expected more than {seq_len} validation tokens in the first "
                f"{HUB_VALIDATION_DOCUMENTS} documents of {self._name!r}, got {len(tokens_N)}; "
                "raise valid_fraction"
            )
        return _even_windows(tokens_N, batches, batch_size, seq_len)

    def _text(self, record: Mapping[str, object]) -> str:
        return _text_of(record, self._text_field, f"hf:{self._name}")

    def _is_validation(self, text: str) -> bool:
        return goes_to_validation(text, self._valid_fraction)

    def _training_tokens(self, record: Mapping[str, object]) -> Tokens | None:
        text = self._text(record)
        return None if self._is_validation(text) else self._tokens(text)

    def _tokens(self, text: str) -> Tokens:
        tokens = self.tokenizer.encode(text.encode(errors="replace"))
        end = [] if self.tokenizer.end_token is None else [self.tokenizer.end_token]
        return np.concatenate([tokens, np.array(end, dtype=tokens.dtype)])


class _HubDocuments:
    """The training documents of a data set for ever, pass after pass, for one peer."""

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
        _check_state(state, "documents", documents=dict, left_over=list)
        self._documents.load_state_dict(state["documents"])
        self._left_over = np.array(state["left_over"], dtype=np.int64)


def open_corpus(
    source: str,
    *,
    format: str = "auto",
    tokenizer: str = "bytes",
    text_field: str = "text",
    valid_fraction: float = 0.05,
    seq_len: int,
) -> Corpus:
    """Open the text of a run.

    Args:
        source: ``"stdlib"``, a file, a folder or ``"hf:NAME"``.
        format: one of `FORMATS`, for files and folders.
        tokenizer: ``"bytes"`` or the path of a ``tokenizers`` JSON file.
        text_field: the field or column of the text.
        valid_fraction: the share of validation text, between 0 and 1.
        seq_len: positions per sequence; each part must hold one more token.

    Raises:
        DataError: the text is missing, empty, too short or needs an extra.
    """
    opened = open_tokenizer(tokenizer)
    if source.startswith(HUB) or format == "hf":
        name = source.removeprefix(HUB)
        return HubCorpus(name, opened, text_field=text_field, valid_fraction=valid_fraction)
    found = documents(source, format=format, text_field=text_field)
    try:
        return LocalCorpus.read(
            found, opened, valid_fraction=valid_fraction, min_tokens=seq_len + 1
        )
    except DataError as error:
        raise DataError(f"data source {source!r}: {error}") from error
    except OSError as error:
        raise DataError(f"data source {source!r} cannot be read: {error}") from error
