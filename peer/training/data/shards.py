"""Shards: a text as tokens, in files that are mapped into memory instead of read.

A folder with `shards.json` is such a text. Its fields:

    format      "atoll-shards-1"
    dtype       "uint16" or "uint32", little-endian, of the files without a header of their own
    vocab_size  number of different tokens of the tokenizer
    train       names of the files with training tokens, in order
    valid       names of those with validation tokens
    text        what the tokens were made of, as `TextSummary` has it; may be absent

Files end in `.bin` (tokens alone) or `.npy` (NumPy's format, one dimension). `shards.json` is
written last, so a folder that has it is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, overload

import numpy as np

from atoll.peer.errors import DataError
from atoll.peer.training.data.tokens import Tokens

FORMAT = "atoll-shards-1"
HEADER = "shards.json"
MAX_HEADER_BYTES = 1 << 24  # names of 100,000 files
DTYPES = ("uint16", "uint32")
SHARD_TOKENS = 100_000_000  # of one file: 200 MB, which a broken copy has to fetch again
WRITE_TOKENS = 1 << 20  # at once


class TokenFiles:
    """The tokens of several files, as one array that is read by places."""

    def __init__(self, files: Sequence[Tokens | TokenFiles], vocab_size: int) -> None:
        """Join arrays of one dimension; each may be mapped into memory.

        Args:
            files: arrays of unsigned integers.
            vocab_size: number of different tokens.
        """
        self._files = [file for file in files if len(file)]
        self._ends = list(accumulate(map(len, self._files)))
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, places: slice) -> Self: ...
    @overload
    def __getitem__(self, places: Tokens) -> Tokens: ...
    def __getitem__(self, places: Tokens | slice) -> Tokens | Self:
        """Return the tokens at some places, in the shape of these; or those of a run, not read yet.

        Raises:
            DataError: a token is none of the tokenizer's.
        """
        if isinstance(places, slice):
            start, stop, _ = places.indices(len(self))
            begins = [0, *self._ends]
            cuts = [
                file[max(0, start - begin) : max(0, stop - begin)]
                for file, begin in zip(self._files, begins, strict=False)
            ]
            return type(self)(cuts, self._vocab_size)
        found = np.empty(places.shape, dtype=np.uint32)
        file_of = np.searchsorted(self._ends, places, side="right")
        for index in np.unique(file_of):
            here = file_of == index
            start = self._ends[index] - len(self._files[index])
            found[here] = self._files[index][places[here] - start]
        if found.size and int(found.max()) >= self._vocab_size:
            raise DataError(
                f"expected tokens below {self._vocab_size} in the shards, got {int(found.max())}; "
                "they are another tokenizer's, or damaged: write them again"
            )
        return found


def is_shards(source: str) -> bool:
    """Return whether a source is a folder of shards."""
    return (Path(source).expanduser() / HEADER).is_file()


def expect_no_shards(folder: Path) -> None:
    """Raise DataError if a folder holds shards."""
    if is_shards(str(folder)):
        raise DataError(f"{folder} holds shards already; choose another folder, or move it away")


def read_header(folder: Path) -> dict[str, Any]:
    """Return the checked header of a folder of shards.

    Raises:
        DataError: it is damaged, or of another version.
    """
    path = folder / HEADER
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(MAX_HEADER_BYTES + 1)[:MAX_HEADER_BYTES])
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: expected a JSON object: {error}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise DataError(f"{path}: expected the format {FORMAT!r}; write the shards again")
    vocab_size, dtype = header.get("vocab_size"), header.get("dtype")
    if type(vocab_size) is not int or vocab_size < 1 or dtype not in DTYPES:
        raise DataError(
            f"{path}: expected a vocab_size above 0 and a dtype among {', '.join(DTYPES)}, got "
            f"{vocab_size!r} and {dtype!r}"
        )
    for part in ("train", "valid"):
        names = header.get(part)
        if not isinstance(names, list) or not all(map(_is_file_name, names)):
            raise DataError(f"{path}: expected names of .bin or .npy files in {part!r}")
    if not isinstance(header.get("text", {}), dict):
        raise DataError(f"{path}: expected an object in 'text'")
    return header


def open_part(folder: Path, header: Mapping[str, Any], part: str) -> TokenFiles:
    """Map the files of one part, `"train"` or `"valid"`, into memory.

    Raises:
        DataError: a file is missing, or holds something else.
    """
    files = [_mapped(folder / name, header["dtype"]) for name in header[part]]
    return TokenFiles(files, header["vocab_size"])


class PartWriter:
    """Appends the tokens of one part, `"train"` or `"valid"`, to files of a folder."""

    def __init__(
        self,
        folder: Path,
        part: str,
        *,
        vocab_size: int,
        shard_tokens: int = SHARD_TOKENS,
        num_tokens: int = 0,
    ) -> None:
        """Begin, or continue behind the first tokens of files that are there.

        Args:
            folder: of the files.
            part: name of the part.
            vocab_size: number of different tokens of the tokenizer.
            shard_tokens: tokens of one file, at most.
            num_tokens: tokens that stay; what was written behind them is cut off.

        Raises:
            DataError: there are fewer.
            OSError: a file cannot be changed.
        """
        self._folder, self._part, self._shard_tokens = folder, part, shard_tokens
        self._dtype = np.dtype(dtype_for(vocab_size)).newbyteorder("<")
        self._waiting: list[Tokens] = []
        self._written = num_tokens
        self.num_tokens = num_tokens
        for index, name in enumerate(self.names):
            kept = min(shard_tokens, num_tokens - index * shard_tokens) * self._dtype.itemsize
            path = folder / name
            if not path.is_file() or path.stat().st_size < kept:
                raise DataError(
                    f"{path} is missing or too short; remove the folder {folder}, and write the "
                    "shards again"
                )
            os.truncate(path, kept)

    @property
    def names(self) -> list[str]:
        """Return the names of the files."""
        return [self._name(index) for index in range(-(-self.num_tokens // self._shard_tokens))]

    def append(self, tokens: Tokens) -> None:
        """Add tokens, which are written when there are many.

        Raises:
            OSError: a file cannot be written.
        """
        self._waiting.append(tokens)
        self.num_tokens += len(tokens)
        if self.num_tokens - self._written >= WRITE_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write all tokens, to the last file, and to the next ones when it is full.

        Raises:
            OSError: a file cannot be written.
        """
        if not self._waiting:
            return
        tokens = np.concatenate(self._waiting)
        self._waiting.clear()
        while len(tokens):
            index, used = divmod(self._written, self._shard_tokens)
            now, tokens = np.split(tokens, [self._shard_tokens - used])
            with (self._folder / self._name(index)).open("ab" if used else "wb") as file:
                file.write(now.astype(self._dtype).tobytes())
            self._written += len(now)

    def _name(self, index: int) -> str:
        return f"{self._part}-{index:05}.bin"


def write_shards(
    folder: Path,
    *,
    train: Tokens | TokenFiles,
    valid: Tokens | TokenFiles,
    vocab_size: int,
    text: Mapping[str, Any],
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Write a text's tokens as shards.

    Args:
        folder: made if missing; it must not hold shards.
        train: training tokens, in order.
        valid: validation tokens.
        vocab_size: number of different tokens of the tokenizer.
        text: plain fields of `TextSummary`.
        shard_tokens: tokens of one file, at most.

    Raises:
        DataError: the folder holds shards already.
        OSError: a file cannot be written.
    """
    expect_no_shards(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = list[PartWriter]()
    for part, tokens in (("train", train), ("valid", valid)):
        writer = PartWriter(folder, part, vocab_size=vocab_size, shard_tokens=shard_tokens)
        for at in range(0, len(tokens), WRITE_TOKENS):
            writer.append(tokens[np.arange(at, min(at + WRITE_TOKENS, len(tokens)))])
        written.append(writer)
    write_header(folder, *written, vocab_size=vocab_size, text=text)


def write_header(
    folder: Path, train: PartWriter, valid: PartWriter, *, vocab_size: int, text: Mapping[str, Any]
) -> None:
    """Write `shards.json`, after which the folder counts as shards.

    Raises:
        OSError: it cannot be written.
    """
    header = {
        "format": FORMAT,
        "dtype": dtype_for(vocab_size),
        "vocab_size": vocab_size,
        "train": train.names,
        "valid": valid.names,
        "text": dict(text),
    }
    for part in (train, valid):
        part.flush()
    put_json(folder / HEADER, header)


def put_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file whole, or leave what was there.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def dtype_for(vocab_size: int) -> str:
    """Return the smaller dtype of shards that holds all tokens."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _is_file_name(name: object) -> bool:
    """Return whether a header may name a file so: none outside of its folder."""
    is_plain = isinstance(name, str) and Path(name).name == name and not name.startswith(".")
    return is_plain and str(name).endswith((".bin", ".npy"))


def _mapped(path: Path, dtype: str) -> Tokens:
    try:
        if path.suffix == ".npy":
            array: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        elif path.stat().st_size == 0:  # nothing can be mapped
            array = np.zeros(0, dtype=dtype)
        else:
            array = np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the shard {path}: {error}; write the shards again") from None
    if array.ndim != 1 or array.dtype.name not in DTYPES:
        raise DataError(
            f"{path}: expected one dimension of uint16 or uint32, got {array.ndim} of "
            f"{array.dtype.name}"
        )
    return array
