"""README.md and docs/library.md hold what they promise: their code and commands are run.

Python blocks run here, page by page, as a reader would paste them, with a reducer of this process
for `connect`. Commands go through the parsers of the command line. `NOT_RUN` names the rest.
"""

import argparse
import inspect
import re
import shlex
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from atoll.coordinator.checkpoints import Checkpoint, save_checkpoint
from atoll.coordinator.run.spec import RunSpec
from atoll.optim import DiLoCo, InProcessGroup, outer_defaults
from atoll.optim.state.layout import Layout
from atoll.peer.cli import SUMMARIES
from atoll.peer.daemon import network
from atoll.peer.daemon.beside.trainer_side import SeatReducer
from atoll.peer.training.opening import build_model
from atoll.peer.training.permission import Allowed
from atoll.peer.training.trained import load_checkpoint
from support.pages import blocks, commands_in, parse_command, run

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "docs/library.md"]

# Blocks by their first line, with the reason why nothing runs them.
NOT_RUN = {
    "4 peers, 12 rounds of 25 steps; in runs/demo": "what the demo prints",
    "from torch import distributed": "needs torchrun; scripts/example_fsdp2.py is tested instead",
}

# Programs other than `atoll` in shell blocks: the command of `atoll` that a script passes its
# arguments to, or None if there are none to check.
PROGRAMS = {"./scripts/demo": "demo", "./scripts/test": None}


BLOCKS = [block for page in PAGES for block in blocks(page)]


def of(language):
    chosen = [each for each in BLOCKS if each.language == language]
    return [each for each in chosen if each.text.splitlines()[0] not in NOT_RUN]


def parse(command):
    if shlex.split(command)[:1] != ["torchrun"]:  # comes with torch
        parse_command(command, PROGRAMS)


class Llama(nn.Module):
    """Called as `transformers.LlamaForCausalLM` is, which is no dependency of Atoll."""

    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids=None, attention_mask=None, labels=None, return_dict=True):
        assert attention_mask is None
        logits = self.lm_head(self.embed(input_ids))
        return types.SimpleNamespace(loss=None, logits=logits) if return_dict else (logits,)


def write_checkpoint(folder):
    """Write `my_models.py` of the page, and a checkpoint of its model."""
    (folder / "my_models.py").write_text(
        "from torch import nn\n"
        "from atoll.peer.training.models import model\n\n\n"
        "@model\n"
        "def build(*, vocab_size, seq_len):\n"
        "    return nn.Sequential(nn.Embedding(vocab_size, 4), nn.Linear(4, vocab_size))\n"
    )
    spec = RunSpec.from_dict({"model": {"custom": "my_models:build"}})
    model = build_model(spec, 256, Allowed.everything_in(spec))
    state = spec.method().genesis(layout := Layout.of(model), layout.flatten(model))
    (folder / "checkpoints").mkdir()
    save_checkpoint(
        folder / "checkpoints" / "my-run-00000000.safetensors",
        Checkpoint(spec=spec, run_id=b"r" * 32, epoch=0, position=0, chain=b"c" * 32, state=state),
    )


@pytest.fixture
def place(tmp_path, monkeypatch, own_modules):
    """A folder, a reducer for `connect`, a checkpoint and a stand-in for `transformers`."""

    def connect(*arguments, **options):
        signature.bind(*arguments, **options)
        member = InProcessGroup(1, inner_steps=2, rounds=2, lr=0.8, momentum=0.3).member(0)
        member.build_model = lambda *, allow_model: nn.Linear(8, 1)
        return member

    signature = inspect.signature(network.connect)
    monkeypatch.setattr(network, "connect", connect)
    hub = types.ModuleType("transformers")
    hub.LlamaConfig, hub.LlamaForCausalLM = argparse.Namespace, Llama
    monkeypatch.setitem(sys.modules, "transformers", hub)
    write_checkpoint(tmp_path)
    return tmp_path


@pytest.fixture
def names():
    """What README's loop takes as given."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    return {
        "invite": "atoll1",
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "batches": list(torch.randn(6, 4, 8)),
        "loss_of": lambda model, batch: model(batch).square().mean(),
    }


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page, place, names):
    namespace = names if page == "README.md" else {}
    for block in of("python"):
        if block.page == page:
            run(block, namespace)
    assert namespace["reducer"].spec.outer.inner_steps


def test_the_loop_of_the_readme_runs_in_four_threads(monkeypatch, place, names):
    """README: each thread takes a member of one group as its reducer, and nothing else changes."""
    loop, trial = [block for block in of("python") if block.page == "README.md"]
    namespace = dict(names)
    run(trial, namespace)
    group = InProcessGroup(
        namespace["group"].size, inner_steps=2, lr=0.8, momentum=0.3, threads=True
    )
    members = iter([group.member(i) for i in range(4)])
    monkeypatch.setattr(network, "connect", lambda invite: next(members))
    peers = []

    def peer(index):
        model = nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        own = names | {"model": model, "optimizer": optimizer}
        run(loop, own)
        peers.append(own["diloco"])

    threads = [threading.Thread(target=peer, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert group.statistics().rounds == 3
    assert len(peers) == 4
    assert all(torch.equal(each.synced_N, peers[0].synced_N) for each in peers)


@pytest.mark.parametrize("block", of("toml"), ids=lambda block: block.name)
def test_a_run_file_of_the_pages_is_valid(block):
    RunSpec.from_toml(block.text)


@pytest.mark.parametrize("block", of(""), ids=lambda block: block.name)
def test_commands_of_the_blocks_are_known(block):
    for line in block.text.splitlines():
        parse(line)


@pytest.mark.parametrize("page", [*PAGES, "docs/commands.md"])
def test_commands_in_the_text_are_known(page):
    for command in commands_in(page):
        parse(command)


def test_the_page_of_commands_names_them_all():
    named = {command.split()[1] for command in commands_in("docs/commands.md")}
    assert named == set(SUMMARIES)


def test_every_block_has_a_test():
    tested = {*of("python"), *of("toml"), *of("")}
    left = [block.name for block in BLOCKS if block not in tested]
    assert len(left) == len(NOT_RUN), left


REFERENCE = {
    "connect": network.connect,
    "InProcessGroup": InProcessGroup,
    "DiLoCo": DiLoCo,
    "outer_defaults": outer_defaults,
    "step": DiLoCo.step,
    "advance": DiLoCo.advance,
    "resize": DiLoCo.resize,
    "build_model": SeatReducer.build_model,
    "load_checkpoint": load_checkpoint,
}


@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_has_the_parameters_of_the_code(name):
    text = (ROOT / "docs/library.md").read_text(encoding="utf-8")
    (written,) = re.findall(rf"^\| `{name}\((.*?)\)`", text, flags=re.MULTILINE)
    shown, kinds = [], inspect.Parameter
    for each in inspect.signature(REFERENCE[name]).parameters.values():
        if each.kind is kinds.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        shown.append(f"**{each.name}" if each.kind is kinds.VAR_KEYWORD else each.name)
    assert written.split(", ") == [word for word in shown if word != "self"]


@pytest.mark.parametrize("page", PAGES)
def test_links_of_the_pages_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target
