"""Documents of a local source, in a fixed order.

Sources:

    stdlib      source of the Python standard library, without tests and generated tables
    a file      text, `.jsonl` (one object per line, the text in `text_field`) or `.parquet`
    a folder    the text, jsonl and parquet files under it, except hidden ones
    shards      a folder of tokens (`atoll.peer.training.data.shards`); they hold no documents

Text and jsonl files may be compressed (`.gz`, `.bz2`, `.xz`); their documents have the names that
they have without. Other compressed files and archives are binary files, and no binary file is read.

The digest of a text is the SHA-256 over `length u64 | name | length u64 | text` of each document in
order, so it depends on names and contents alone: not on the folder, nor on compression.
"""

import bz2
import gzip
import hashlib
import json
import lzma
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from atoll.peer.errors import DataError
from atoll.peer.extras import extra
from atoll.peer.training.data.shards import is_shards, read_header

STDLIB = "stdlib"
NOT_SOURCE = frozenset({"site-packages", "dist-packages", "__pycache__"})
TESTS = frozenset({"test", "tests", "idle_test"})  # more than half of the text otherwise
GENERATED = frozenset({"encodings", "pydoc_data"})  # tables of numbers and one 757 kB string
SKIPPED_FOLDERS = NOT_SOURCE | TESTS | GENERATED
FORMATS = ("auto", "text", "jsonl", "parquet", "hf")
COMPRESSED: dict[str, Callable[[Path, Any], object]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
MAX_NAMED = 3  # of the files that are not read


@dataclass(frozen=True, kw_only=True)
class Document:
    """One piece of text."""

    key: str
    """Name in the corpus, the same on every machine; determines the split."""
    data: bytes
    """Text in UTF-8."""


@dataclass(kw_only=True)
class Found:
    """The files of a source, as far as they have been read."""

    files: int = 0
    skipped: list[str] = field(default_factory=list)
    """Names of binary files."""

    def __str__(self) -> str:
        """Name the files that are not read; empty if there are none."""
        if not self.skipped:
            return ""
        names = ", ".join(sorted(self.skipped)[:MAX_NAMED])
        more = ", ..." if len(self.skipped) > MAX_NAMED else ""
        count = "1 binary file" if len(self.skipped) == 1 else f"{len(self.skipped)} binary files"
        return f"{count} not read ({names}{more})"


class TextDigest:
    """The digest of documents that are added in order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, document: Document) -> None:
        """Add a document."""
        for part in (document.key.encode(errors="replace"), document.data):
            self._hash.update(len(part).to_bytes(8, "big"))
            self._hash.update(part)

    def hexdigest(self) -> str:
        """Return the digest in hex."""
        return self._hash.hexdigest()


def expect_no_arrow(path: Path) -> None:
    """Refuse a folder that the package `datasets` wrote with `save_to_disk`.

    Its texts are in Arrow files, which are not read; the rest would pass for a small text.

    Raises:
        DataError: it is such a folder.
    """
    has = [(path / name).is_file() for name in ("state.json", "dataset_info.json")]
    if all(has) or (path / "dataset_dict.json").is_file():
        raise DataError(
            f"the folder {str(path)!r} was written by save_to_disk, and its Arrow files are not "
            "read; write the data set with to_parquet or to_json, and name that file"
        )


def text_digest(source: str, *, format: str = "auto", text_field: str = "text") -> str:
    """Return the digest of a local text, in hex.

    That of shards is what they were made of; empty if they do not state it.

    Args, raises: as `documents`.
    """
    if is_shards(source):
        text = read_header(Path(source).expanduser()).get("text", {})
        return str(text.get("sha256", ""))
    digest = TextDigest()
    for document in documents(source, format=format, text_field=text_field):
        digest.add(document)
    return digest.hexdigest()


def text_size(source: str) -> int:
    """Return the size in bytes of a local source's files, as they are on the disk; 0 of shards.

    Raises:
        DataError: there is no such file or folder.
    """
    if source == STDLIB or is_shards(source):
        return 0  # some 10 MB; nobody reads all of the shards
    expect_source(source)
    path = Path(source).expanduser()
    return sum(file.stat().st_size for file in ([path] if path.is_file() else _visible_files(path)))


def expect_source(source: str) -> None:
    """Check that a local source exists.

    Raises:
        DataError: there is no such file or folder.
    """
    if source != STDLIB and not Path(source).expanduser().exists():
        raise DataError(
            f"data source {source!r} does not exist; expected 'stdlib', a file, a folder or "
            "hf:NAME; name this peer's copy with --data"
        )


def documents(
    source: str, *, format: str = "auto", text_field: str = "text", found: Found | None = None
) -> Iterator[Document]:
    """Yield the documents of a local source in a fixed order.

    Args:
        source: `"stdlib"`, or the path of a file or folder.
        format: one of `FORMATS`; `auto` decides by each file's suffix.
        text_field: field or column of the text in jsonl and parquet files.
        found: takes the number of files, and the names of those that are not read.

    Raises:
        DataError: a missing source, an unknown format, or a record without text.
    """
    if format not in FORMATS:
        raise DataError(f"unknown data format {format!r}; expected one of {', '.join(FORMATS)}")
    found = found or Found()
    if source == STDLIB:
        for document in _stdlib_documents():
            found.files += 1
            yield document
        return
    expect_source(source)
    path = Path(source).expanduser()
    expect_no_arrow(path)
    for file in [path] if path.is_file() else _visible_files(path):
        name = file.name if path.is_file() else file.relative_to(path).as_posix()
        if _is_binary(file, format):
            found.skipped.append(name)
            continue
        found.files += 1
        name = name.removesuffix(file.suffix) if file.suffix.lower() in COMPRESSED else name
        yield from _reader(file, format)(file, name, text_field)


def _stdlib_documents() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted((file.relative_to(root).as_posix(), file) for file in _source_files(root))
    if not files:
        raise DataError(
            f"this Python has no source of its standard library in {root}; "
            "name a text file or a folder as the data source"
        )
    for key, file in files:
        yield Document(key=key, data=file.read_bytes())


def _source_files(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        # Not entered: installed packages may be ten times the library.
        inner[:] = [name for name in inner if name not in SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _visible_files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


Reader = Callable[[Path, str, str], Iterator[Document]]


def _format(file: Path, format: str) -> str:
    if format != "auto":
        return format
    name = file.name.lower()
    suffix = Path(name.removesuffix(file.suffix.lower()) if _is_compressed(file) else name).suffix
    return {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}.get(suffix, "text")


def _is_compressed(file: Path) -> bool:
    return file.suffix.lower() in COMPRESSED


def _is_binary(file: Path, format: str) -> bool:
    """Return whether a file that would be read as text is none, by git's rule."""
    if _format(file, format) != "text":
        return False
    with _open(file) as text:
        return b"\0" in _read(text, 8192, file)


def _open(file: Path) -> IO[bytes]:
    opened = (
        COMPRESSED[file.suffix.lower()](file, "rb") if _is_compressed(file) else open(file, "rb")
    )
    return cast("IO[bytes]", opened)


def _read(text: IO[bytes], size: int, file: Path) -> bytes:
    try:
        return text.read(size)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{file}: cannot be decompressed: {error}") from error


def _reader(file: Path, format: str) -> Reader:
    readers: dict[str, Reader] = {
        "text": _read_text,
        "jsonl": _read_jsonl,
        "parquet": _read_parquet,
    }
    return readers[_format(file, format)]


def _read_text(file: Path, name: str, text_field: str) -> Iterator[Document]:
    with _open(file) as text:
        yield Document(key=name, data=_read(text, -1, file))


def _read_jsonl(file: Path, name: str, text_field: str) -> Iterator[Document]:
    with _open(file) as lines:
        for number, line in enumerate(_lines(lines, file), start=1):
            if line.strip():
                text = _json_text(line, text_field, f"{file}, line {number}")
                yield Document(key=f"{name}:{number}", data=text.encode(errors="replace"))


def _lines(text: IO[bytes], file: Path) -> Iterator[bytes]:
    try:
        yield from text
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{file}: cannot be decompressed: {error}") from error


def _json_text(line: bytes, text_field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: expected a JSON object, got {line[:40]!r} ({error})") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(record).__name__}")
    return text_of(record, text_field, where)


def text_of(record: Mapping[str, object], text_field: str, where: str) -> str:
    """Return the text of a record.

    Args:
        record: fields of the record.
        text_field: name of the field with the text.
        where: name of the record in an error message.

    Raises:
        DataError: the field is missing or not text.
    """
    text = record.get(text_field)
    if not isinstance(text, str):
        raise DataError(
            f"{where}: expected text in the field {text_field!r}, got fields "
            f"{', '.join(map(str, record))}; set text_field of [data]"
        )
    return text


def _read_parquet(file: Path, name: str, text_field: str) -> Iterator[Document]:
    parquet = extra("pyarrow.parquet", f"the parquet file {str(file)!r}")
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
            record = text_of({text_field: text}, text_field, f"{file}, row {number}")
            yield Document(key=f"{name}:{number}", data=record.encode(errors="replace"))


def goes_to_validation(key: str, fraction: float) -> bool:
    """Return whether the document named `key` is validation text, by a hash of the name."""
    digest = hashlib.sha256(key.encode(errors="replace")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64
