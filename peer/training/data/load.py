"""Open the text of a run as batches of tokens.

Each peer draws its own stream and can resume it exactly. The text comes from files on this machine
(`documents.py`) or from a Hugging Face data set in streaming mode (`hub.py`): `hf:NAME`, or the
bare name with the format `hf`. Text that was tokenised before comes from shards (`shards.py`).

Tokens are bytes, with a zero byte at the end of each document, or those of a `tokenizers` JSON
file, with its end token if it has one (`tokens.py`). A hash of its name decides whether a document
is used for validation, so the split is the same on every machine. A corpus of too few documents
uses its tail instead (`corpus.py`).
"""

from pathlib import Path
from typing import Any

from atoll.peer.errors import DataError
from atoll.peer.training.data.corpus import Corpus, LocalCorpus, TextSummary, TokenStream
from atoll.peer.training.data.documents import (
    Document,
    Found,
    documents,
    expect_source,
    goes_to_validation,
)
from atoll.peer.training.data.hub import HUB, HubCorpus
from atoll.peer.training.data.shards import is_shards, open_part, read_header
from atoll.peer.training.data.tokens import ByteTokenizer, JsonTokenizer, Tokenizer, open_tokenizer

__all__ = [
    "ByteTokenizer",
    "Corpus",
    "Document",
    "HubCorpus",
    "JsonTokenizer",
    "LocalCorpus",
    "TokenStream",
    "Tokenizer",
    "documents",
    "goes_to_validation",
    "open_corpus",
    "open_tokenizer",
]


def open_corpus(
    source: str,
    *,
    format: str = "auto",
    tokenizer: str = "bytes",
    tokenizer_sha256: str | None = None,
    text_field: str = "text",
    valid_fraction: float = 0.05,
    split: str = "train",
    revision: str | None = None,
    seq_len: int,
    public: bool = False,
) -> Corpus:
    """Open the text of a run.

    Args:
        source: `"stdlib"`, a file, a folder (of text, or of shards) or `"hf:NAME"`.
        format: one of `FORMATS`, for files and folders.
        tokenizer: `"bytes"` or the path of a `tokenizers` JSON file.
        tokenizer_sha256: digest of that file, in hex; None accepts any.
        text_field: field or column of the text.
        valid_fraction: fraction of validation text, between 0 and 1.
        split: split of a Hugging Face data set.
        revision: commit, branch or tag of a Hugging Face data set; None for the newest.
        seq_len: positions per sequence; each part must hold one more token.
        public: do not use the owner's login at the Hugging Face hub.

    Raises:
        DataError: the text is missing, empty, too short or needs an extra.
    """
    opened = open_tokenizer(tokenizer, sha256=tokenizer_sha256)
    if source.startswith(HUB) or format == "hf":
        name = source.removeprefix(HUB)
        return HubCorpus(
            name,
            opened,
            text_field=text_field,
            valid_fraction=valid_fraction,
            split=split,
            revision=revision,
            public=public,
        )
    expect_source(source)
    if is_shards(source):
        return _open_shards(Path(source).expanduser(), opened, min_tokens=seq_len + 1)
    found = Found()
    try:
        return LocalCorpus.read(
            documents(source, format=format, text_field=text_field, found=found),
            opened,
            valid_fraction=valid_fraction,
            min_tokens=seq_len + 1,
            found=found,
        )
    except DataError as error:
        skipped = f"; {found}" if str(found) else ""
        raise DataError(f"data source {source!r}: {error}{skipped}") from error
    except OSError as error:
        raise DataError(f"data source {source!r} cannot be read: {error}") from error


def _open_shards(folder: Path, tokenizer: Tokenizer, *, min_tokens: int) -> Corpus:
    header = read_header(folder)
    if header["vocab_size"] != tokenizer.vocab_size:
        raise DataError(
            f"the shards in {folder} are of a tokenizer of {header['vocab_size']} tokens, and the "
            f"run's has {tokenizer.vocab_size}; write them again with the run's"
        )
    train, valid = (open_part(folder, header, part) for part in ("train", "valid"))
    if min(len(train), len(valid)) < min_tokens:
        raise DataError(
            f"expected at least {min_tokens} tokens each for training and validation in the shards "
            f"in {folder}, got {len(train)} and {len(valid)}; add shards or reduce seq_len"
        )
    text: dict[str, Any] = header.get("text", {})
    summary = TextSummary(
        files=_count(text.get("files")),
        documents=_count(text.get("documents")),
        num_bytes=_count(text.get("num_bytes")),
        train_tokens=len(train),
        valid_tokens=len(valid),
        sha256=str(text.get("sha256", "")),
        not_read=str(text.get("not_read", "")),
    )
    return LocalCorpus(train_N=train, valid_N=valid, tokenizer=tokenizer, summary=summary)


def _count(value: object) -> int:
    return value if type(value) is int else 0
