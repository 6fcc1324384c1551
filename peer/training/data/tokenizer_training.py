"""Train a byte-level BPE tokenizer on documents (arXiv:1508.07909, on bytes as in GPT-2).

Every text can be encoded, because all 256 bytes are tokens. The same text and size give the same
file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from atoll.peer.errors import DataError
from atoll.peer.extras import extra
from atoll.peer.training.data.documents import Document

END = "<|endoftext|>"  # token 0; `tokens.END_TOKENS` finds it
SMALLEST = 257  # the bytes and the end
LARGEST = 1 << 20
# Words with the space before them, numbers of up to three digits, punctuation, line ends: the
# pattern of Llama 3.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TRIAL_BYTES = 1 << 20  # of text, encoded again to report the compression
REPORT_BYTES = 64 << 20  # of text between two lines: some seconds


@dataclass(frozen=True, kw_only=True)
class TrainedTokenizer:
    """A tokenizer, and how well it compresses the beginning of its text."""

    json: str
    """The `tokenizers` JSON."""
    vocab_size: int
    num_bytes: int
    """Of the text."""
    bytes_per_token: float


def train_tokenizer(
    source: Iterable[Document],
    vocab_size: int,
    *,
    say: Callable[[str], None] = lambda line: None,
    show_progress: bool = False,
) -> TrainedTokenizer:
    """Train a tokenizer.

    Args:
        source: the text; each document is read once.
        vocab_size: number of tokens, with the bytes and the end of a document. A short text gives
            fewer.
        say: takes lines of progress.
        show_progress: show bars in the terminal.

    Raises:
        ExtraMissing: `tokenizers` is not installed.
        DataError: the size is out of range, or there is no text.
    """
    if not SMALLEST <= vocab_size <= LARGEST:
        raise DataError(
            f"expected a vocabulary of {SMALLEST} (all bytes, and the end of a document) to "
            f"{LARGEST:,} tokens, got {vocab_size:,}"
        )
    package = extra("tokenizers", "training a tokenizer")
    tokenizer = package.Tokenizer(package.models.BPE())
    level = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = package.pre_tokenizers.Sequence(
        [package.pre_tokenizers.Split(package.Regex(WORDS), "isolated"), level]
    )
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(level.alphabet()),
        show_progress=show_progress,
    )
    texts = _Texts(source, say)
    tokenizer.train_from_iterator(iter(texts), trainer=trainer)
    if not texts.num_bytes:
        raise DataError("expected text to train a tokenizer on, got none")
    return TrainedTokenizer(
        json=tokenizer.to_str(pretty=True),
        vocab_size=tokenizer.get_vocab_size(),
        num_bytes=texts.num_bytes,
        bytes_per_token=len(texts.begin) / len(tokenizer.encode(texts.begin.decode()).ids),
    )


class _Texts:
    """Documents as text, with their size and their beginning."""

    def __init__(self, source: Iterable[Document], say: Callable[[str], None]) -> None:
        self._source, self._say = source, say
        self.num_bytes, self.begin = 0, b""

    def __iter__(self) -> Iterator[str]:
        for document in self._source:
            text = document.data.decode(errors="replace")
            if len(self.begin) < TRIAL_BYTES:
                self.begin += text[:TRIAL_BYTES].encode()  # cut between characters
            before, self.num_bytes = self.num_bytes, self.num_bytes + len(document.data)
            if self.num_bytes // REPORT_BYTES > before // REPORT_BYTES:
                self._say(f"read {self.num_bytes / 1e6:,.0f} MB")
            yield text
        self._say(f"read {self.num_bytes / 1e6:,.1f} MB; merging")
