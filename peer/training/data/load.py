"""Open the text of a run as batches of tokens.

Each peer draws its own stream and can resume it exactly. The text comes from files on this machine
(`documents.py`) or from a Hugging Face data set in streaming mode (`hub.py`): `hf:NAME`, or the
bare name with the format `hf`.

Tokens are bytes, with a zero byte at the end of each document, or those of a `tokenizers` JSON
file, with its end token if it has one (`tokens.py`). A hash of its name decides whether a document
is used for validation, so the split is the same on every machine. A corpus of too few documents
uses its tail instead (`corpus.py`).
"""

from atoll.peer.errors import DataError
from atoll.peer.training.data.corpus import Corpus, LocalCorpus, TokenStream
from atoll.peer.training.data.documents import (
    Document,
    documents,
    expect_source,
    goes_to_validation,
)
from atoll.peer.training.data.hub import HUB, HubCorpus
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
    text_field: str = "text",
    valid_fraction: float = 0.05,
    seq_len: int,
    public: bool = False,
) -> Corpus:
    """Open the text of a run.

    Args:
        source: `"stdlib"`, a file, a folder or `"hf:NAME"`.
        format: one of `FORMATS`, for files and folders.
        tokenizer: `"bytes"` or the path of a `tokenizers` JSON file.
        text_field: field or column of the text.
        valid_fraction: fraction of validation text, between 0 and 1.
        seq_len: positions per sequence; each part must hold one more token.
        public: do not use the owner's login at the Hugging Face hub.

    Raises:
        DataError: the text is missing, empty, too short or needs an extra.
    """
    opened = open_tokenizer(tokenizer)
    if source.startswith(HUB) or format == "hf":
        name = source.removeprefix(HUB)
        return HubCorpus(
            name, opened, text_field=text_field, valid_fraction=valid_fraction, public=public
        )
    expect_source(source)
    found = documents(source, format=format, text_field=text_field)
    try:
        return LocalCorpus.read(
            found, opened, valid_fraction=valid_fraction, min_tokens=seq_len + 1
        )
    except DataError as error:
        raise DataError(f"data source {source!r}: {error}") from error
    except OSError as error:
        raise DataError(f"data source {source!r} cannot be read: {error}") from error
