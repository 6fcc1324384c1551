import contextlib
import gc
import json
import re
import sys
import types

import numpy as np
import pytest
import torch

from atoll.coordinator.run.spec import RunSpec
from atoll.peer.errors import DataError, ExtraMissing
from atoll.peer.training.data import corpus as corpus_module
from atoll.peer.training.data import documents
from atoll.peer.training.data import load as data
from atoll.peer.training.data.prefetch import Prefetched
from atoll.peer.training.data.remarks import expect_text, remarks

WORDS = ["the sea", "a low island", "closed ring", "of coral", "round a lagoon"]


def text(number, sentences=20):
    return ". ".join(WORDS[(number + i) % 5] + f" {number}" for i in range(sentences))


@pytest.fixture
def folder(tmp_path):
    for number in range(60):
        (tmp_path / f"part{number % 3}").mkdir(exist_ok=True)
        (tmp_path / f"part{number % 3}" / f"{number}.txt").write_text(text(number))
    return tmp_path


def opened(source, **options):
    return data.open_corpus(str(source), **{"seq_len": 16} | options)


def stream(corpus, peer_id="alice", seed=1):
    return corpus.stream(seed=seed, peer_id=peer_id, batch_size=4, seq_len=16)


def as_text(batch):
    return [bytes(row.tolist()).decode() for row in batch]


# --- the standard library


@pytest.fixture(scope="module")
def stdlib():
    return data.open_corpus("stdlib", seq_len=128)


def test_the_standard_library_is_split_by_file(stdlib):
    total = len(stdlib.train_N) + len(stdlib.valid_N)
    assert total > 5_000_000
    assert 0.01 < len(stdlib.valid_N) / total < 0.15
    assert b"def __init__(self" in stdlib.train_N.tobytes()


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


# --- streams


def test_a_stream_resumes_exactly(folder):
    corpus = opened(folder)
    whole, before = stream(corpus), stream(corpus)
    expected = [whole.next_batch() for _ in range(6)]
    for _ in range(3):
        before.next_batch()
    state = json.loads(json.dumps(before.state_dict()))
    after = stream(corpus)
    after.load_state_dict(state)
    assert all(torch.equal(after.next_batch(), batch) for batch in expected[3:])


def test_peers_and_seeds_draw_different_text(folder):
    corpus = opened(folder)
    first = stream(corpus).next_batch()
    assert torch.equal(first, stream(corpus).next_batch())
    assert not torch.equal(first, stream(corpus, peer_id="bob").next_batch())
    assert not torch.equal(first, stream(corpus, seed=2).next_batch())


def test_a_stream_is_the_same_for_ever():
    corpus = data.LocalCorpus(
        train_N=np.arange(200, dtype=np.uint8),
        valid_N=np.arange(50, dtype=np.uint8),
        tokenizer=data.ByteTokenizer(),
    )
    drawn = corpus.stream(seed=0, peer_id="p", batch_size=3, seq_len=4)
    batches = [drawn.next_batch()[:, 0].tolist() for _ in range(2)]
    assert batches == [[51, 126, 10], [116, 192, 137]]


def test_batches_hold_inputs_and_targets(folder):
    batch = stream(opened(folder)).next_batch()
    assert batch.shape == (4, 17)
    assert batch.dtype == torch.int64


def test_windows_reach_the_last_token():
    corpus = data.LocalCorpus(
        train_N=np.arange(10, dtype=np.uint8),
        valid_N=np.arange(10, dtype=np.uint8),
        tokenizer=data.ByteTokenizer(),
    )
    drawn = corpus.stream(seed=0, peer_id="p", batch_size=64, seq_len=7)
    assert set(drawn.next_batch()[:, 0].tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    "state", [{}, {"kind": "documents", "documents": 1}, {"kind": "windows", "batches": "3"}]
)
def test_a_state_of_another_stream_is_refused(folder, state):
    with pytest.raises(DataError, match="expected the state of a 'windows' stream"):
        stream(opened(folder)).load_state_dict(state)


# --- validation


def test_validation_is_the_same_at_every_call(folder):
    first, second = (
        opened(folder, valid_fraction=0.2).validation(batches=3, batch_size=4, seq_len=16)
        for _ in range(2)
    )
    assert len(first) == 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_document_is_in_both_parts(folder):
    corpus = opened(folder, valid_fraction=0.3)
    parts = [set(part.tobytes().split(b"\0")) - {b""} for part in (corpus.train_N, corpus.valid_N)]
    assert parts[0].isdisjoint(parts[1])
    assert len(parts[0] | parts[1]) == 60
    assert 8 <= len(parts[1]) <= 28


def test_the_split_depends_on_names_alone(folder):
    before = opened(folder, valid_fraction=0.3)
    (folder / "part0" / "0.txt").write_text("other text altogether")
    after = opened(folder, valid_fraction=0.3)
    moved = set(after.valid_N.tobytes().split(b"\0")) ^ set(before.valid_N.tobytes().split(b"\0"))
    assert len(moved) in (0, 2)


def test_one_file_gives_its_tail_to_validation(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("a" * 900 + "z" * 100)
    corpus = opened(file, valid_fraction=0.1)
    assert corpus.train_N.tobytes().startswith(b"a" * 900)
    assert set(corpus.valid_N.tobytes()) <= {ord("z"), 0}
    assert len(corpus.valid_N) == 100


def test_a_tiny_text_still_gives_a_window_to_each_part(tmp_path):
    (tmp_path / "tiny.txt").write_text("x" * 34)
    corpus = opened(tmp_path / "tiny.txt", valid_fraction=0.01)
    assert min(len(corpus.train_N), len(corpus.valid_N)) >= 17


# --- formats


def test_a_folder_is_read_without_hidden_and_binary_files(folder):
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0binary")
    everything = b"".join(document.data for document in data.documents(str(folder)))
    assert b"hidden" not in everything and b"binary" not in everything


def write_jsonl(path, field="text"):
    path.write_text("\n".join(json.dumps({field: text(i), "id": i}) for i in range(40)) + "\n\n")
    return path


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


# --- what was found


def test_what_was_found_is_counted(folder):
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0binary")
    corpus = opened(folder)
    found = corpus.summary
    assert found.files == 60
    assert found.num_bytes == sum(len(text(number)) for number in range(60))
    assert found.train_tokens + found.valid_tokens == found.num_bytes + 60  # one end each
    assert found.not_read == "1 binary file not read (picture.png)"


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


def spec_of(**sections):
    data_section = {"seq_len": 16, "source": "text"} | sections.pop("data", {})
    return RunSpec.from_dict({"data": data_section, **sections})


def test_the_amount_of_text_is_said(folder):
    corpus = opened(folder)
    ((level, line),) = remarks(spec_of(run={"rounds": 2}), corpus, steps_left=5)
    assert level == "info"
    assert re.fullmatch(r"data: 60 files, [\d.]+ kB, [\d.]+k tokens, SHA-256 [0-9a-f]{64}", line)


def test_another_text_than_the_organisers_is_a_warning(folder):
    corpus = opened(folder)
    spec = spec_of(data={"sha256": "ab" * 32})
    _, (level, line) = remarks(spec, corpus, steps_left=5)
    assert level == "warning" and "this text is not the organiser's text" in line
    expect_text(spec, corpus)
    strict = spec_of(data={"sha256": "ab" * 32, "same_text": True})
    with pytest.raises(DataError, match=r"expected the SHA-256 abababababab, got .* \(60 files"):
        expect_text(strict, corpus)
    same = spec_of(data={"sha256": corpus.summary.sha256, "same_text": True})
    expect_text(same, corpus)
    assert len(list(remarks(same, corpus, steps_left=5))) == 1


def test_the_library_of_another_python_is_no_warning(folder):
    spec = spec_of(data={"sha256": "ab" * 32, "source": "stdlib"})
    _, (level, line) = remarks(spec, opened(folder), steps_left=5)
    assert level == "info" and "the library of Python 3." in line


def test_a_run_that_states_no_digests_is_a_warning(folder):
    spec = spec_of(data={"tokenizer": "t.json"}, model={"custom": "mine:build"})
    levels, lines = zip(*remarks(spec, opened(folder), steps_left=5), strict=True)
    assert levels == ("warning", "warning", "info")
    assert "whether 't.json' is the organiser's" in lines[0] and "mine:build" in lines[1]


@pytest.mark.parametrize(
    ("steps_left", "told"),
    [(None, "times in 100 rounds"), (100_000, "times in the rounds left"), (1, None)],
)
def test_a_text_that_is_too_short_for_the_run_is_a_warning(folder, steps_left, told):
    found = list(remarks(spec_of(), opened(folder), steps_left=steps_left))[1:]
    assert [level for level, _ in found] == ["warning"] * (told is not None)
    assert told is None or told in found[0][1]


# --- tokenizers


def make_tokenizer(path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text(i) for i in range(30)], trainer)
    tokenizer.save(str(path))
    return str(path)


def test_a_tokenizers_file_encodes_and_decodes(tmp_path):
    tokenizer = data.open_tokenizer(make_tokenizer(tmp_path / "t.json"))
    tokens = tokenizer.encode("the sea … über".encode())
    decoder = tokenizer.decoder()
    assert "".join(decoder.feed(int(token)) for token in tokens) == "the sea … über"
    assert tokenizer.end_token == 0
    assert tokens.dtype == np.uint16 and int(tokens.max()) < tokenizer.vocab_size


def test_a_corpus_uses_the_tokenizer_of_the_run(folder):
    name = make_tokenizer(folder.parent / "tokenizer.json")
    corpus = opened(folder, tokenizer=name)
    assert len(corpus.train_N) < len(opened(folder).train_N) / 2
    assert (corpus.train_N == 0).sum() >= 40


def test_a_missing_tokenizer_is_named():
    pytest.importorskip("tokenizers")
    with pytest.raises(
        DataError, match=r"expected 'bytes' or a tokenizers JSON file, got 'no\.json'"
    ):
        data.open_tokenizer("no.json")


def test_bytes_decode_character_by_character():
    decoder = data.ByteTokenizer().decoder()
    parts = [decoder.feed(byte) for byte in "aß€".encode() + b"\xffb\xc3("]
    assert parts == ["a", "", "ß", "", "", "€", "�", "b", "", "�("]


@pytest.mark.parametrize(
    ("package", "options"),
    [
        ("pyarrow.parquet", {"source": "a.parquet"}),
        ("tokenizers", {"source": "stdlib", "tokenizer": "t.json"}),
        ("datasets", {"source": "hf:some/name"}),
    ],
)
def test_a_missing_extra_is_said_with_its_cure(monkeypatch, tmp_path, package, options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExtraMissing, match=r"is not installed; install it with: pip install "):
        data.open_corpus(seq_len=16, **options)


# --- missing and empty data


def test_an_empty_folder_is_said_to_have_no_text(tmp_path):
    with pytest.raises(DataError, match="found no text; name a file or a folder that has some"):
        data.open_corpus(str(tmp_path), seq_len=16)


def test_a_missing_source_says_what_is_possible():
    with pytest.raises(DataError, match="'nowhere' does not exist; expected 'stdlib', a file"):
        opened("nowhere")


def test_an_unknown_format_names_the_known_ones(folder):
    with pytest.raises(DataError, match="unknown data format 'csv'; expected one of auto, text"):
        opened(folder, format="csv")


@pytest.mark.parametrize("content", ["", "too short"])
def test_too_little_text_is_refused(tmp_path, content):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(
        DataError, match=r"expected at least 34 tokens of text .*, got \d+; add text"
    ):
        opened(tmp_path)


def test_a_large_corpus_rests_on_disk(folder, monkeypatch):
    expected = opened(folder)
    monkeypatch.setattr(corpus_module, "SPOOL_BYTES", 1000)
    corpus = opened(folder)
    gc.collect()
    assert isinstance(corpus.train_N, np.memmap)
    assert np.array_equal(corpus.train_N, expected.train_N)
    assert torch.equal(stream(corpus).next_batch(), stream(expected).next_batch())


# --- Hugging Face data sets


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    for shard in range(3):
        rows = [json.dumps({"text": text(shard * 100 + i)}) for i in range(30)]
        (tmp_path / "set" / f"{shard}.jsonl").write_text("\n".join(rows))
    return f"hf:{tmp_path / 'set'}"


def test_a_streamed_data_set_resumes_exactly(hub):
    corpus = opened(hub)
    whole, before = stream(corpus), stream(corpus)
    expected = [whole.next_batch() for _ in range(40)]
    for _ in range(25):
        before.next_batch()
    state = json.loads(json.dumps(before.state_dict()))
    after = stream(opened(hub))
    after.load_state_dict(state)
    assert all(torch.equal(after.next_batch(), batch) for batch in expected[25:])


def test_a_streamed_data_set_is_drawn_ahead_in_the_same_order(hub):
    plain = stream(opened(hub))
    expected = [plain.next_batch() for _ in range(60)]  # more than one pass
    with contextlib.closing(Prefetched(stream(opened(hub)))) as ahead:
        assert all(torch.equal(ahead.next_batch(), batch) for batch in expected[:25])
        state = json.loads(json.dumps(ahead.state_dict()))
    with contextlib.closing(Prefetched(stream(opened(hub)))) as ahead:
        ahead.next_batch()
        ahead.load_state_dict(state)
        assert all(torch.equal(ahead.next_batch(), batch) for batch in expected[25:])


def test_a_streamed_data_set_starts_again_at_its_end(hub):
    drawn = stream(opened(hub))
    drawn.next_batch()
    passes = []
    for _ in range(900):
        drawn.next_batch()
        passes.append(drawn.state_dict()["documents"]["pass"])
    assert passes == sorted(passes)
    assert passes[-1] - passes[0] in (1, 2)


def test_peers_start_at_documents_of_their_own(hub):
    corpus = opened(hub)
    firsts = {as_text(stream(corpus, peer_id=f"p{i}").next_batch())[0] for i in range(12)}
    assert len(firsts) > 6


def test_a_streamed_data_set_without_training_documents_is_refused(hub):
    with pytest.raises(DataError, match="holds no training documents"):
        stream(opened(hub, valid_fraction=1.0)).next_batch()


def test_validation_of_a_streamed_data_set_is_never_trained_on(hub):
    corpus = opened(hub, valid_fraction=0.3)
    batches = corpus.validation(batches=2, batch_size=3, seq_len=16)
    again = opened(hub, valid_fraction=0.3).validation(batches=2, batch_size=3, seq_len=16)
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))
    drawn = stream(corpus)
    trained = "".join("".join(as_text(drawn.next_batch())) for _ in range(400))
    held = [text(n) for n in range(330) if data.goes_to_validation(text(n), 0.3)]
    assert held
    assert not any(f"{document}\0" in trained for document in held)


def test_a_streamed_data_set_without_the_field_is_refused(hub):
    with pytest.raises(DataError, match="expected text in the field 'body', got fields text"):
        stream(opened(hub, text_field="body")).next_batch()


def test_a_data_set_that_cannot_be_opened_is_named(hub):
    with pytest.raises(DataError, match="cannot open the data set '/no/such/set'"):
        opened("hf:/no/such/set")
