"""Documents of a local source, in a fixed order.

Sources:

    stdlib      source of the Python standard library, without tests and generated tables
    a file      text, `.jsonl` (one object per line, the text in `text_field`) or `.parquet`
    a folder    the text, jsonl and parquet files under it, except hidden ones
"""

import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.peer.errors import DataError
from atoll.peer.extras import extra

STDLIB = "stdlib"
NOT_SOURCE = frozenset({"site-packages", "dist-packages", "__pycache__"})
TESTS = frozenset({"test", "tests", "idle_test"})  # more than half of the text otherwise
GENERATED = frozenset({"encodings", "pydoc_data"})  # tables of numbers and one 757 kB string
SKIPPED_FOLDERS = NOT_SOURCE | TESTS | GENERATED
FORMATS = ("auto", "text", "jsonl", "parquet", "hf")


@dataclass(frozen=True, kw_only=True)
class Document:
    """One piece of text."""

    key: str
    """Name in the corpus, the same on every machine; determines the split."""
    data: bytes
    """Text in UTF-8."""


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


def documents(source: str, *, format: str = "auto", text_field: str = "text") -> Iterator[Document]:
    """Yield the documents of a local source in a fixed order.

    Args:
        source: `"stdlib"`, or the path of a file or folder.
        format: one of `FORMATS`; `auto` decides by each file's suffix.
        text_field: field or column of the text in jsonl and parquet files.

    Raises:
        DataError: a missing source, an unknown format, or a record without text.
    """
    if format not in FORMATS:
        raise DataError(f"unknown data format {format!r}; expected one of {', '.join(FORMATS)}")
    if source == STDLIB:
        yield from _stdlib_documents()
        return
    expect_source(source)
    path = Path(source).expanduser()
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
            f"this Python has no source of its standard library in {root}; "
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
    if b"\0" not in data[:8192]:  # git's rule for a binary file, too
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
