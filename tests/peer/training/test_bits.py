"""Bits a byte of a checkpoint, and `atoll eval`."""

import json
import math

import pytest
import torch
from torch import nn

from atoll.coordinator.checkpoints import save_checkpoint
from atoll.peer.cli import main as cli
from atoll.peer.errors import DataError
from atoll.peer.training.bits import held_out, measure
from atoll.peer.training.data.load import ByteTokenizer, open_tokenizer
from atoll.peer.training.data.tokenizer_training import train_tokenizer
from atoll.peer.training.devices import Device
from atoll.peer.training.digests import with_digests
from atoll.peer.training.trained import load_checkpoint
from support.weights import checkpoint_of, spec_of

TEXT = "the closed ring of a low coral island; "
SHAPE = {"overrides": {"dim": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 24}}
CPU = Device.choose("cpu")


class Halves(nn.Module):
    """Gives a chance of one half to each of the two tokens after the one that it sees."""

    def forward(self, tokens_BT):
        logits_BTV = torch.full((*tokens_BT.shape, 256), -40.0)
        for more in (1, 2):
            logits_BTV.scatter_(2, ((tokens_BT + more) % 256)[..., None], 0.0)
        return logits_BTV


@pytest.fixture
def texts(tmp_path):
    for name in ("own", "other"):
        (tmp_path / f"{name}.txt").write_text((TEXT + name) * 60)
    return tmp_path


def loaded(path):
    spec = spec_of(model=SHAPE, data={"source": str(path)})
    return load_checkpoint(checkpoint_of(with_digests(spec, None)))


def test_one_bit_a_token_is_one_bit_a_byte_of_bytes():
    batches = [torch.arange(10, 27)[None].repeat(2, 1), torch.arange(40, 57)[None]]
    seen = []
    found = measure(Halves(), ByteTokenizer(), batches, device=CPU, on_batch=seen.append)
    assert found.bits_per_byte == pytest.approx(1.0)
    assert found.loss == pytest.approx(math.log(2))
    assert (found.num_tokens, found.num_bytes, seen) == (48, 48, [1, 2])


def test_an_end_of_a_document_costs_bits_and_has_no_bytes():
    batch = torch.tensor([[254, 255, 0, 1, 2]])
    found = measure(Halves(), ByteTokenizer(), [batch], device=CPU)
    assert (found.num_tokens, found.num_bytes) == (4, 3)
    assert found.bits_per_byte == pytest.approx(4 / 3)
    with pytest.raises(DataError, match="expected tokens of text to measure, got none"):
        measure(Halves(), ByteTokenizer(), [torch.zeros(1, 2, dtype=torch.long)], device=CPU)


def test_the_bytes_of_byte_level_tokens_are_exact_wherever_they_are_cut(tmp_path):
    text = "Grüße, 日本語! <|endoftext|>" * 3
    documents = [type("D", (), {"data": text.encode(), "key": "a"})]
    trained = train_tokenizer(documents, 280)
    (tmp_path / "tokenizer.json").write_text(trained.json)
    opened = open_tokenizer(str(tmp_path))
    tokens = [int(token) for token in opened.encode(text.encode())]
    ends = tokens.count(opened.end_token)
    for cut in range(len(tokens)):
        halves = opened.num_bytes(tokens[:cut]) + opened.num_bytes(tokens[cut:])
        assert halves == len(text.encode()) - ends * len("<|endoftext|>")
    assert ends == 3


def test_the_bytes_of_other_tokens_are_those_of_their_text(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "coral": 1, "ring": 2}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(str(tmp_path)).num_bytes([1, 2]) == len(b"coral ring")


def test_the_runs_own_text_gives_the_part_that_it_holds_out(texts):
    trained = loaded(texts / "own.txt")
    own = held_out(trained, data=str(texts / "own.txt"), tokenizer=None, tokens=128)
    assert own.name == "held-out text of the run"
    last = (TEXT + "own") * 60 + "\0"  # the end of the document
    assert all(bytes(row.tolist()).decode() in last[-400:] for b in own.batches for row in b)
    with pytest.raises(DataError, match="--data PATH"):
        held_out(trained, data=None, tokenizer=None, tokens=128)


def test_another_text_is_taken_whole(texts):
    trained = loaded(texts / "own.txt")
    other = held_out(trained, data=str(texts / "other.txt"), tokenizer=None, tokens=10**9)
    assert other.name == f"all of {texts / 'other.txt'}"
    rows = [bytes(row.tolist()) for batch in other.batches for row in batch]
    assert rows[0].startswith(b"the closed") and sum(map(len, rows)) > len(TEXT + "other") * 60
    few = held_out(trained, data=str(texts / "other.txt"), tokenizer=None, tokens=1)
    assert len(few.batches) == 1


def test_the_command_measures_a_checkpoint(texts, capsys):
    spec = with_digests(spec_of(model=SHAPE, data={"source": str(texts / "own.txt")}), None)
    path = texts / "run-00000000.safetensors"
    save_checkpoint(path, checkpoint_of(spec))
    words = ["eval", str(path), "--data", str(texts / "own.txt"), "--device", "cpu"]
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bits_per_byte"] == pytest.approx(8.0, abs=0.3)  # fresh: it knows nothing
    assert found["loss"] / math.log(2) * found["num_tokens"] / found["num_bytes"] == (
        pytest.approx(found["bits_per_byte"])
    )
    assert (found["round"], found["text"]) == (0, "held-out text of the run")
    assert cli.main(words) == 0
    assert "bits a byte" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--limit", "3"], "are for tasks"),
        (["--tasks", "a", "--data", "b"], "exclude each other"),
    ],
)
def test_options_that_do_not_fit_are_refused(words, told, capsys):
    assert cli.main(["eval", "nowhere.safetensors", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-3", "1e3", "x"])
def test_a_count_below_one_is_refused(number, capsys):
    with pytest.raises(SystemExit):
        cli.main(["eval", "x", "--tokens", number])
    assert "expected a number of at least 1" in capsys.readouterr().err
