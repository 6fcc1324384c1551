"""Files and their formats: which are read, and how."""

import json
import re
import sys
import types

import numpy as np
import pytest

from atoll.peer.errors import DataError
from atoll.peer.training.data import documents
from atoll.peer.training.data import load as data
from support.texts import opened, stream, text, write_jsonl


def test_the_standard_library_comes_without_tests_and_tables():
    keys = [document.key for document in data.documents("stdlib")]
    assert keys == sorted(keys)
    assert "asyncio/tasks.py" in keys
    folders = {part for key in keys for part in key.split("/")[:-1]}
    assert folders.isdisjoint({"test", "tests", "site-packages", "encodings"})


def test_a_python_without_sources_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="has no source of its standard library"):
        opened("stdlib")


def test_a_folder_is_read_without_hidden_and_binary_files(folder):
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0binary")
    everything = b"".join(document.data for document in data.documents(str(folder)))
    assert b"hidden" not in everything and b"binary" not in everything


def test_jsonl_is_read_line_by_line(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", field="body")
    found = list(data.documents(str(tmp_path / "a.jsonl"), text_field="body"))
    assert [document.data.decode() for document in found] == [text(i) for i in range(40)]
    assert found[6].key == "a.jsonl:7"
    assert stream(opened(tmp_path / "a.jsonl", text_field="body")).next_batch().shape == (4, 17)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "bad.jsonl, line 2: expected a JSON object, got b'{broken"),
        ("[1, 2]", "line 2: expected a JSON object, got list"),
        ('{"body": "x"}', "expected text in the field 'text', got fields body; set text_field"),
        ('{"text": 3}', "expected text in the field 'text'"),
    ],
)
def test_a_broken_jsonl_line_is_named(tmp_path, line, message):
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": "fine"}) + "\n" + line)
    with pytest.raises(DataError, match=re.escape(message)):
        opened(tmp_path / "bad.jsonl")


def test_a_named_format_wins_over_the_suffix(tmp_path):
    file = write_jsonl(tmp_path / "records.txt")
    assert len(list(data.documents(str(file), format="jsonl"))) == 40
    assert len(list(data.documents(str(file), format="text"))) == 1


def write_parquet(path, rows=40):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": [text(i) for i in range(rows)], "id": list(range(rows))})
    parquet.write_table(table, path, row_group_size=7)
    return path


def test_parquet_is_read_row_by_row(tmp_path):
    file = write_parquet(tmp_path / "a.parquet")
    found = list(data.documents(str(file)))
    assert [document.data.decode() for document in found] == [text(i) for i in range(40)]
    with pytest.raises(DataError, match="expected a column 'body', got text, id"):
        opened(file, text_field="body")


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"bad.parquet: expected a parquet file"):
        opened(tmp_path / "bad.parquet")


def test_formats_may_be_mixed_in_a_folder(folder):
    write_jsonl(folder / "more.jsonl")
    write_parquet(folder / "most.parquet")
    assert len(list(data.documents(str(folder)))) == 60 + 40 + 40


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_compressed_text_is_the_same_text(tmp_path, suffix):
    (tmp_path / "plain").mkdir()
    (tmp_path / "packed").mkdir()
    write_jsonl(tmp_path / "plain" / "a.jsonl")
    (tmp_path / "plain" / "b.txt").write_text(text(1))
    for file in (tmp_path / "plain").iterdir():
        with documents.COMPRESSED[suffix](tmp_path / "packed" / (file.name + suffix), "wb") as out:
            out.write(file.read_bytes())
    plain, packed = (opened(tmp_path / name) for name in ("plain", "packed"))
    assert packed.summary == plain.summary
    assert np.array_equal(packed.valid_N, plain.valid_N)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_damaged_compressed_file_is_named(tmp_path, name, suffix):
    with documents.COMPRESSED[suffix](tmp_path / f"{name}{suffix}", "wb") as out:
        out.write(b'{"text": "x"}\n' * 9000)
    file = tmp_path / f"{name}{suffix}"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match=f"{name}{suffix}: cannot be decompressed"):
        opened(tmp_path)


def test_the_digest_of_a_text_covers_names_and_contents_alone(folder):
    before = opened(folder).summary.sha256
    assert documents.text_digest(str(folder)) == before
    moved = folder.rename(folder.with_name("elsewhere"))
    assert opened(moved).summary.sha256 == before
    (moved / "part0" / "0.txt").rename(moved / "part0" / "new.txt")
    renamed = opened(moved).summary.sha256
    (moved / "part0" / "new.txt").write_text("other")
    assert len({before, renamed, opened(moved).summary.sha256}) == 3


def test_files_that_are_not_read_are_named_when_there_is_too_little(tmp_path):
    for name in "dcba":
        (tmp_path / f"{name}.zst").write_bytes(b"(\xb5/\xfd\0\0")
    with pytest.raises(DataError, match=r"4 binary files not read \(a.zst, b.zst, c.zst, ...\)"):
        opened(tmp_path)


@pytest.mark.parametrize("names", [("state.json", "dataset_info.json"), ("dataset_dict.json",)])
@pytest.mark.parametrize("kind", ["auto", "hf"])
def test_a_folder_of_arrow_files_is_named(tmp_path, monkeypatch, names, kind):
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))
    sys.modules["datasets"].config = types.SimpleNamespace()
    for name in names:
        (tmp_path / name).write_text('{"some": "description"}' * 90)
    with pytest.raises(DataError, match=r"was written by save_to_disk, .* to_parquet or to_json"):
        opened(tmp_path, format=kind)


def test_an_empty_folder_is_said_to_have_no_text(tmp_path):
    with pytest.raises(DataError, match="found no text; name a file or a folder that has some"):
        data.open_corpus(str(tmp_path), seq_len=16)


def test_a_missing_source_says_what_is_possible():
    with pytest.raises(DataError, match="'nowhere' does not exist; expected 'stdlib', a file"):
        opened("nowhere")


def test_an_unknown_format_names_the_known_ones(folder):
    with pytest.raises(DataError, match="unknown data format 'csv'; expected one of auto, text"):
        opened(folder, format="csv")
