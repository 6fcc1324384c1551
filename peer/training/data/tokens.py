"""Tokenizers: bytes, or a `tokenizers` JSON file."""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from atoll.peer.errors import DataError
from atoll.peer.extras import extra

Tokens = np.ndarray[Any, np.dtype[Any]]

BYTES = "bytes"  # name of the tokenizer that needs no file
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class TextDecoder(Protocol):
    """Converts tokens to text, one at a time."""

    def feed(self, token: int) -> str:
        """Return the text that `token` completes: often one character, sometimes none."""
        ...


class Tokenizer(Protocol):
    """Converts text to tokens and back."""

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""
        ...

    @property
    def end_token(self) -> int | None:
        """Token that ends a document; None if the tokenizer has none."""
        ...

    def encode(self, data: bytes) -> Tokens:
        """Return the tokens of UTF-8 text, without an end token."""
        ...

    def decoder(self) -> TextDecoder:
        """Return a fresh decoder."""
        ...

    def num_bytes(self, tokens: Sequence[int]) -> int:
        """Return the length in UTF-8 of the text that tokens stand for; end tokens have none."""
        ...


class ByteTokenizer:
    """256 tokens, one per byte."""

    vocab_size = 256
    end_token = 0  # no text file holds a zero byte

    def encode(self, data: bytes) -> Tokens:
        """Return the bytes as uint8."""
        return np.frombuffer(data, dtype=np.uint8)

    def decoder(self) -> TextDecoder:
        """Return a decoder that waits for the rest of a character."""
        return _ByteDecoder()

    def num_bytes(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens that are no end."""
        return sum(token != self.end_token for token in tokens)


class _ByteDecoder:
    def __init__(self) -> None:
        self._pending = b""

    def feed(self, token: int) -> str:
        self._pending += bytes([token])
        try:
            text = self._pending.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":  # CPython's text; there is no code
                return ""
            text = self._pending.decode(errors="replace")
        self._pending = b""
        return text


class JsonTokenizer:
    """A `tokenizers` JSON file (needs the `data` extra)."""

    def __init__(self, path: Path, sha256: str | None = None) -> None:
        """Read the file; check its digest, in hex, before parsing it.

        Raises:
            DataError: the extra is not installed, or the file is missing, another or not a
                tokenizer.
        """
        module = extra("tokenizers", f"the tokenizer {str(path)!r}")
        try:
            raw = path.read_bytes()
            expect_digest(path, raw, sha256)
            self._tokenizer = module.Tokenizer.from_buffer(raw)
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"expected 'bytes' or a tokenizers JSON file, got {str(path)!r} ({error})"
            ) from error
        self._new_stream = extra("tokenizers.decoders", "decoding").DecodeStream
        known = map(self._tokenizer.token_to_id, END_TOKENS)
        self.end_token: int | None = next((i for i in known if i is not None), None)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def text_of(self, token: int) -> str:
        """Return a token as the file spells it."""
        return str(self._tokenizer.id_to_token(token))

    def encode(self, data: bytes) -> Tokens:
        """Return the tokens, as uint16 if they fit, else uint32; replace invalid UTF-8."""
        text = data.decode(errors="replace")
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.asarray(tokens, dtype=np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def decoder(self) -> TextDecoder:
        """Return a decoder that waits for the rest of a character."""
        return _JsonDecoder(self._tokenizer, self._new_stream(skip_special_tokens=True))

    def num_bytes(self, tokens: Sequence[int]) -> int:
        """Return the length of the text.

        It is exact if the tokenizer is of bytes (byte-level BPE). Else a character that is cut at
        either end counts as a replacement character, and a space at the beginning may be lost.
        """
        if self._lengths is None:
            return len(self._tokenizer.decode(list(tokens), skip_special_tokens=True).encode())
        return sum(self._lengths[token] for token in tokens)

    @cached_property
    def _lengths(self) -> list[int] | None:
        """Bytes of each token; None if the letters of a token are not its bytes."""
        fields = json.loads(self._tokenizer.to_str())
        decoder = fields["decoder"] or {}
        if not any(each.get("type") == "ByteLevel" for each in decoder.get("decoders", [decoder])):
            return None
        lengths = [0] * self.vocab_size
        for text, token in fields["model"]["vocab"].items():
            lengths[token] = len(text)
        for added in fields["added_tokens"]:
            lengths[added["id"]] = 0 if added["special"] else len(added["content"].encode())
        return lengths


class _JsonDecoder:
    def __init__(self, tokenizer: Any, stream: Any) -> None:  # noqa: ANN401 - an optional package
        self._tokenizer, self._stream = tokenizer, stream

    def feed(self, token: int) -> str:
        return self._stream.step(self._tokenizer, token) or ""


def expect_digest(path: Path, raw: bytes, sha256: str | None) -> None:
    """Check the bytes of a tokenizer's file against the run's digest, if the run states one.

    Raises:
        DataError: it is another file.
    """
    found = hashlib.sha256(raw).hexdigest()
    if sha256 is not None and found != sha256:
        raise DataError(
            f"the tokenizer {str(path)!r} is not the run's: expected the SHA-256 {sha256[:12]}, "
            f"got {found[:12]}; take the organiser's file, or omit --tokenizer if the run sends it"
        )


def open_tokenizer(name: str, *, sha256: str | None = None) -> Tokenizer:
    """Return the tokenizer of a run.

    Args:
        name: `"bytes"`, or the path of a `tokenizers` JSON file or of a folder with one.
        sha256: digest of that file, in hex; None accepts any.

    Raises:
        DataError: the extra is not installed, or the file is missing, another or not a tokenizer.
    """
    return ByteTokenizer() if name == BYTES else JsonTokenizer(tokenizer_file(name), sha256)


def tokenizer_file(name: str) -> Path:
    """Return the file that a tokenizer's path means: in a folder, as of Hugging Face, its JSON."""
    path = Path(name).expanduser()
    return path / "tokenizer.json" if path.is_dir() else path
