"""docs/recipes.md holds what it promises: its parts are run at tiny size, as a reader would.

The coordinator runs in a thread; peers and all other commands run as a reader starts them.
"""

import dataclasses
import re
import shlex
import tomllib
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from atoll.coordinator.run.spec import RunSpec, template
from atoll.optim.state.layout import Layout
from atoll.peer.cli import main as cli
from atoll.peer.training.data.documents import documents
from atoll.peer.training.data.tokenizer_training import train_tokenizer
from atoll.peer.training.digests import with_digests
from atoll.peer.training.models import logits_of
from atoll.peer.training.opening import build_model
from atoll.peer.training.permission import Allowed
from atoll.peer.training.trained import load_checkpoint
from support.organiser import Organiser, until
from support.pages import ROOT, blocks, commands_in, parse_command, run
from support.weights import SHAPE, write_folder

PAGE = "docs/recipes.md"
BASE = "SmolLM2-135M"
TEXT = "The coral grows slowly; the ring of a low coral island is closed. "
TINY = {
    "run": {"rounds": 2},
    "data": {"seq_len": 16},
    "inner": {"batch_size": 2, "warmup_steps": 1},
    "outer": {"inner_steps": 2},
    "round": {"min_peers": 1},
    "coordinator": {"listen": "127.0.0.1:0", "dht_listen": "127.0.0.1:0"},
}
ON_THIS_MACHINE = {
    "peer": ["--yes", "--device", "cpu", "--state-dir", "peer", "--listen", "/ip4/127.0.0.1/tcp/0"],
    "eval": ["--device", "cpu"],
    "sample": ["--device", "cpu", "--max-tokens", "4"],
}

pytestmark = [
    # peft 0.21 still asks for what transformers 5.24 has renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


def part(number):
    """The blocks of a part of the page."""
    lines = (ROOT / PAGE).read_text(encoding="utf-8").splitlines()
    starts = [i for i, line in enumerate(lines, start=1) if re.match(r"## \d", line)]
    first, last = (*starts, len(lines))[number - 1 : number + 1]
    return [block for block in blocks(PAGE) if first < block.line < last]


@pytest.fixture
def place(tmp_path, monkeypatch, own_modules):
    """A folder with text and weights, as the page has them."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    (tmp_path / "corpus").mkdir()
    for number in range(30):
        (tmp_path / "corpus" / f"{number}.txt").write_text(TEXT * 5)
    write_folder(tmp_path / BASE, dataclasses.replace(SHAPE, vocab_size=280))
    tokenizer = train_tokenizer(documents("corpus"), 270)
    (tmp_path / BASE / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    (tmp_path / BASE / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}'
    )
    return tmp_path


def write_run(text):
    """Write RUN.toml as the page has it, at tiny size."""
    fields = tomllib.loads(text)
    for name, values in TINY.items():
        fields[name] = fields.get(name, {}) | values
    with open("RUN.toml", "w", encoding="utf-8") as file:
        file.write(template(RunSpec.from_dict(fields)))


def coordinate(words):
    """Start the page's `atoll coordinator` in a thread."""
    args = cli._parser(cli._load("coordinator"), "coordinator").parse_args(words)
    spec = with_digests(RunSpec.load(args.spec), None)
    organiser = Organiser(spec, args.state_dir)
    organiser.start()
    with open("invite.txt", "w") as file:
        file.write(str(organiser.invite))
    return organiser


def follow(number):
    """Do what a part of the page says; return the names that its Python blocks have."""
    names = {}
    with ExitStack() as stack:
        for block in part(number):
            if block.language == "toml":
                write_run(block.text)
            elif block.language == "python":
                run(block, names)
            else:
                for line in block.text.splitlines():
                    do(shlex.split(line)[1:], stack)
    return names


def do(words, stack):
    if words[0] == "coordinator":
        stack.callback(coordinate(words).stop)
        return
    words = ["invite.txt" if word == "INVITE" else word for word in words]
    assert cli.main(words + ON_THIS_MACHINE.get(words[0], [])) == 0, words
    if words[0] == "peer":
        until(lambda: list(Path("state/checkpoints").glob("*2.safetensors")), "a checkpoint")


def expect_equal(model, trained):
    """Check that a model of `transformers` computes what a checkpoint's model computes."""
    tokens = torch.arange(2, 34).view(2, 16)
    with torch.no_grad():
        ours = logits_of(trained.model.eval(), tokens)
        theirs = model.eval()(tokens).logits
    assert torch.allclose(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_a_model_is_trained_further(place, capsys):
    base = write_folder(place / "again", dataclasses.replace(SHAPE, vocab_size=280))
    names = follow(1)
    trained = names["trained"]
    assert trained.position == 2
    assert not torch.equal(trained.model.norm.weight, base.norm.weight)
    expect_equal(names["model"], trained)
    assert names["tokenizer"].encode(TEXT) == list(trained.tokenizer.encode(TEXT.encode()))
    told = capsys.readouterr().out
    assert "held-out text of the run" in told and "2 rounds; " in told


@pytest.mark.slow
def test_adapters_are_trained_and_exported(place):
    names = follow(2)
    trained = load_checkpoint("state/checkpoints", tokenizer=BASE, init=BASE)
    assert trained.position == 2
    assert all("lora_" in name for name in Layout.of(trained.model).names)
    expect_equal(names["model"], trained)
    merged = names["AutoModelForCausalLM"].from_pretrained("my-merged")
    expect_equal(merged, trained)


@pytest.mark.slow
def test_a_model_of_transformers_is_built_as_the_page_says(place, monkeypatch):
    module, toml = part(3)
    (place / "my_models.py").write_text(module.text)
    monkeypatch.syspath_prepend(place)
    spec = RunSpec.from_toml(toml.text)
    model = build_model(spec, 256, Allowed.everything_in(spec))
    assert model.config.hidden_size == 128


def test_a_tokenizer_is_trained_as_the_page_says(place):
    follow(4)
    assert (place / "tokenizer.json").exists()


def test_tasks_are_named_as_the_command_takes_them():
    (block,) = part(5)
    parse_command(block.text, {})


@pytest.mark.parametrize("command", commands_in(PAGE))
def test_commands_in_the_text_are_known(command):
    parse_command(command, {})


def test_every_block_is_in_a_part_that_is_run():
    assert [b for number in range(1, 6) for b in part(number)] == list(blocks(PAGE))


def test_links_lead_somewhere():
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    anchors = {
        re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    for target in re.findall(r"\]\(#([^)]+)\)", text):
        assert target in anchors, target
