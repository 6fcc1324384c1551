"""Data sets of Hugging Face, copied to shards with the real `datasets` package."""

import contextlib
import hashlib
import json

import numpy as np
import pytest
import torch

from atoll.coordinator.run.spec import RunSpec
from atoll.peer.cli import main
from atoll.peer.errors import DataError
from atoll.peer.training.data import hub as hub_module
from atoll.peer.training.data import load as data
from atoll.peer.training.data import make_shards as copying
from atoll.peer.training.data import shards
from atoll.peer.training.data.documents import goes_to_validation
from atoll.peer.training.data.hub import HubCorpus
from atoll.peer.training.data.make_shards import UNFINISHED, make_shards
from atoll.peer.training.data.prefetch import Prefetched
from support.texts import as_text, make_tokenizer, opened, stream, text

TEXTS = [text(shard * 100 + i) for shard in range(3) for i in range(30)]
FRACTION = 0.3


def spec_of(source, **fields):
    fields = {"source": source, "seq_len": 16, "valid_fraction": FRACTION} | fields
    return RunSpec.from_dict({"data": fields})


def part_of(out, part):
    tokens = shards.open_part(out, shards.read_header(out), part)
    return bytes(tokens[np.arange(len(tokens))].astype(np.uint8)).decode()


def files_in(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}


def held_out():
    return [each for each in TEXTS if goes_to_validation(each, FRACTION)]


@pytest.fixture
def small_steps(monkeypatch):
    """Save the place each few documents."""
    monkeypatch.setattr(copying, "SAVE_TOKENS", 5000)
    monkeypatch.setattr(shards, "WRITE_TOKENS", 1000)


def test_a_data_set_is_copied_in_order_and_split_as_its_stream(hub, tmp_path):
    summary = make_shards(spec_of(hub), tmp_path / "out")
    trained = [each for each in TEXTS if each not in held_out()]
    assert part_of(tmp_path / "out", "train") == "".join(f"{each}\0" for each in trained)
    assert part_of(tmp_path / "out", "valid") == "".join(f"{each}\0" for each in held_out())
    assert (summary.files, summary.documents, summary.num_bytes) == (0, 90, len("".join(TEXTS)))
    digest = b""
    for each in TEXTS:
        digest = hashlib.sha256(digest + hashlib.sha256(each.encode()).digest()).digest()
    assert summary.sha256 == digest.hex()
    corpus = opened(tmp_path / "out")
    assert corpus.summary == summary
    assert not (tmp_path / "out" / UNFINISHED).exists()
    stated = shards.read_header(tmp_path / "out")["text"]
    assert (stated["source"], stated["split"]) == (hub, "train")


def test_peers_with_shards_validate_as_peers_that_stream_do(hub, tmp_path):
    make_shards(spec_of(hub), tmp_path / "out")
    streamed = opened(hub, valid_fraction=FRACTION)
    batches = [
        corpus.validation(batches=2, batch_size=3, seq_len=16)
        for corpus in (streamed, opened(tmp_path / "out"))
    ]
    assert all(map(torch.equal, *batches))


def test_validation_documents_behind_the_first_are_in_neither_part(hub, tmp_path, monkeypatch):
    for module in (hub_module, copying):
        monkeypatch.setattr(module, "HUB_VALIDATION_DOCUMENTS", 40)
    make_shards(spec_of(hub), tmp_path / "out")
    early = [each for each in TEXTS[:40] if each in held_out()]
    assert part_of(tmp_path / "out", "valid") == "".join(f"{each}\0" for each in early)
    assert len(early) < len(held_out())
    assert not any(f"{each}\0" in part_of(tmp_path / "out", "train") for each in held_out())


def test_shards_of_a_data_set_are_drawn_ahead(hub, tmp_path):
    make_shards(spec_of(hub), tmp_path / "out")
    plain = stream(opened(tmp_path / "out"))
    with contextlib.closing(Prefetched(stream(opened(tmp_path / "out")))) as ahead:
        batches = [ahead.next_batch() for _ in range(9)]
    assert all(torch.equal(batch, plain.next_batch()) for batch in batches)
    trained = part_of(tmp_path / "out", "train")
    assert all(row in trained for batch in batches for row in as_text(batch))


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("saves", [1, 3])
def test_a_copy_that_was_interrupted_continues_where_it_was(hub, tmp_path, saves):
    make_shards(spec_of(hub), tmp_path / "whole")
    told = []

    def interrupt(copied):
        told.append(copied.documents)
        if len(told) > saves:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        make_shards(spec_of(hub), out, tell=interrupt)
    assert not shards.is_shards(str(out))
    again = []
    make_shards(spec_of(hub), out, tell=lambda copied: again.append(copied.documents))
    assert again[0] == told[-1] > 0
    assert files_in(out) == files_in(tmp_path / "whole")


@pytest.mark.usefixtures("small_steps")
def test_tokens_behind_the_saved_place_are_written_again(hub, tmp_path, monkeypatch):
    """As after a crash, which leaves them in the files."""
    make_shards(spec_of(hub), tmp_path / "whole")
    out, left, whole = tmp_path / "out", iter(range(50)), HubCorpus.tokens_of

    def tokens_of(corpus, text):
        if next(left, None) is None:
            raise OSError("no space left")
        return whole(corpus, text)

    with monkeypatch.context() as patched:
        patched.setattr(HubCorpus, "tokens_of", tokens_of)
        with pytest.raises(OSError, match="no space left"):
            make_shards(spec_of(hub), out)
    saved = json.loads((out / UNFINISHED).read_text())
    with (out / "train-00000.bin").open("ab") as file:
        file.write(b"more")
    assert (out / "train-00000.bin").stat().st_size > 2 * saved["train_tokens"] > 0
    make_shards(spec_of(hub), out)
    assert files_in(out) == files_in(tmp_path / "whole")


@pytest.mark.usefixtures("small_steps")
def test_a_copy_does_not_continue_with_another_text(hub, tmp_path):
    out = tmp_path / "out"
    unfinished(hub, out)
    for fields in ({"valid_fraction": 0.2}, {"split": "test"}, {"revision": "main"}):
        with pytest.raises(DataError, match=f"another text: expected {next(iter(fields))}"):
            make_shards(spec_of(hub, **fields), out)
    with pytest.raises(DataError, match="another text: expected source"):
        make_shards(spec_of(str(tmp_path / "set"), seq_len=8), out)
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="another text: expected tokenizer"):
        make_shards(spec_of(hub, tokenizer=tokenizer), out)


def unfinished(hub, out):
    """Leave a copy after its first save."""
    told = iter([None])

    def interrupt(copied):
        if next(told, copied) is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_shards(spec_of(hub), out, tell=interrupt)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"{}", b'{"made_of": 3}', b'{"other": 1}'])
def test_a_damaged_place_is_refused(hub, tmp_path, raw):
    out = tmp_path / "out"
    unfinished(hub, out)
    (out / UNFINISHED).write_bytes(raw)
    with pytest.raises(DataError, match=r"unfinished.json is damaged .* remove this one"):
        make_shards(spec_of(hub), out)


@pytest.mark.usefixtures("small_steps")
def test_a_shard_that_lost_tokens_is_refused(hub, tmp_path):
    out = tmp_path / "out"
    unfinished(hub, out)
    (out / "train-00000.bin").write_bytes(b"cut")
    with pytest.raises(DataError, match="is missing or too short; remove the folder"):
        make_shards(spec_of(hub), out)


def test_a_data_set_without_one_part_is_refused(hub, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"17 validation tokens .* got 0; raise valid_fraction"):
        make_shards(spec_of(hub, valid_fraction=1e-9), out)
    assert not (out / UNFINISHED).exists()
    for file in (tmp_path / "set").iterdir():
        file.write_text("\n".join(json.dumps({"text": each}) for each in held_out()))
    with pytest.raises(DataError, match=r"17 training tokens .* got 0; lower valid_fraction"):
        make_shards(spec_of(hub), out)


@pytest.mark.parametrize("row", ["{", '{"text": null}', '{"other": "text"}'])
def test_records_that_cannot_be_read_are_named(hub, tmp_path, row):
    (tmp_path / "set" / "2.jsonl").write_text(row)
    with pytest.raises(DataError, match=r"cannot be read further|expected text in the field"):
        make_shards(spec_of(hub), tmp_path / "out")


def test_a_split_that_is_absent_is_named(hub, tmp_path):
    with pytest.raises(DataError, match=r"cannot open the data set .*nope"):
        make_shards(spec_of(hub, split="nope"), tmp_path / "out")


def test_a_tokenizer_of_its_own_is_kept_apart_by_its_digest(hub, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json")
    spec = spec_of(hub, tokenizer=tokenizer)
    summary = make_shards(spec, tmp_path / "out")
    stated = shards.read_header(tmp_path / "out")["text"]
    raw = (tmp_path / "tokenizer.json").read_bytes()
    assert stated["tokenizer"] == hashlib.sha256(raw).hexdigest()
    corpus = data.open_corpus(str(tmp_path / "out"), tokenizer=tokenizer, seq_len=16)
    assert len(corpus.train_N) == summary.train_tokens < summary.num_bytes


@pytest.mark.usefixtures("small_steps")
def test_the_command_copies_a_data_set_and_tells_its_progress(hub, tmp_path, capsys):
    run, out = tmp_path / "RUN.toml", tmp_path / "out"
    run.write_text(f"[data]\nseq_len = 16\nvalid_fraction = {FRACTION}\n")
    assert main.main(["shards", str(run), "--data", hub, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "of 90 documents; train on them with --data" in printed.out
    lines = printed.err.splitlines()
    assert len(lines) > 2 and all(line.endswith("tokens so far") for line in lines)
    assert main.main(["shards", str(run), "--data", hub, "--out", str(out)]) == 2
