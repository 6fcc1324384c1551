"""The adapter for lm-evaluation-harness; the harness itself runs if it is installed."""

import json
import types

import pytest
import torch
from torch import nn

from atoll.coordinator.checkpoints import save_checkpoint
from atoll.peer.cli import main as cli
from atoll.peer.training.data.load import ByteTokenizer
from atoll.peer.training.devices import Device
from atoll.peer.training.harness import Scorer
from atoll.peer.training.trained import Trained
from support.weights import checkpoint_of, spec_of

CONTEXT = 8
CPU = Device.choose("cpu")


class Sees(nn.Module):
    """Logits that depend on how many tokens it sees and on the last one."""

    def forward(self, tokens_BT):
        assert tokens_BT.shape[1] <= CONTEXT
        place_T = torch.arange(tokens_BT.shape[1])
        logits_BTV = nn.functional.one_hot((tokens_BT + 1) % 256, 256).float()
        return logits_BTV * (2.0 + place_T)[None, :, None]


def scorer(model=None):
    spec = spec_of(data={"seq_len": CONTEXT})
    trained = Trained(model=model or Sees(), spec=spec, tokenizer=ByteTokenizer(), positions=(0,))
    return Scorer(trained, CPU)


def chances(tokens, first):
    """Log-likelihood of the tokens from the index `first`, seen in one piece."""
    logits_TV = Sees()(torch.tensor([tokens[:-1]]))[0].log_softmax(-1)
    return sum(float(logits_TV[i - 1, tokens[i]]) for i in range(first, len(tokens)))


def test_a_continuation_has_the_chances_of_its_tokens():
    found, is_greedy = scorer().likelihood([97, 98], [99, 100])
    assert found == pytest.approx(chances([97, 98, 99, 100], 2)) and is_greedy
    found, is_greedy = scorer().likelihood([97, 98], [99, 102])
    assert found == pytest.approx(chances([97, 98, 99, 102], 2)) and not is_greedy
    found, _ = scorer().likelihood([], [1, 2])
    assert found == pytest.approx(chances([0, 1, 2], 1))


def test_a_long_context_loses_its_beginning():
    context = list(range(40, 60))
    found, _ = scorer().likelihood(context, [60, 70])
    assert found == pytest.approx(chances([*context[-7:], 60, 70], 7))


def test_a_long_text_is_scored_in_pieces_and_each_token_once():
    text = "".join(map(chr, range(65, 85)))
    tokens = [0, *text.encode()]
    pieces = [tokens[0:9], tokens[8:17], tokens[12:21]]  # the last sees as much as fits
    expected = chances(pieces[0], 1) + chances(pieces[1], 1) + chances(pieces[2], 5)
    assert scorer().rolling(text) == pytest.approx(expected)
    assert scorer().rolling("") == 0.0


def test_generated_text_ends_before_a_stop():
    make = scorer().continued
    assert make("abc", {"until": ["g", "k"], "max_gen_toks": 20}) == "def"
    assert make("abc", {"until": "zz", "max_gen_toks": 4}) == "defg"


@pytest.mark.filterwarnings("ignore")  # of the harness and its many packages
def test_a_task_of_the_harness_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"text": "the ring of", "choices": [" coral", " x"], "gold": 0}] * 3
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "coral.yaml").write_text(
        "task: coral\ndataset_path: json\noutput_type: multiple_choice\ntest_split: test\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tmp_path / 'rows.jsonl'}\n"
        'doc_to_text: "{{text}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{gold}}"\n'
        "metric_list:\n  - metric: acc\n"
    )
    path = tmp_path / "run-00000000.safetensors"
    shape = {"overrides": {"dim": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 24}}
    save_checkpoint(path, checkpoint_of(spec_of(model=shape)))
    words = ["eval", str(path), "--task-path", str(tmp_path), "--device", "cpu", "--json"]
    assert cli.main([*words, "--tasks", "coral", "--limit", "2"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["tasks"]["coral"]["acc"] in (0.0, 1.0)
    assert cli.main([*words, "--tasks", "no_such_task"]) == 2


def test_a_missing_harness_is_said_with_its_cure(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    monkeypatch.setattr(
        "atoll.peer.training.trained.load_checkpoint",
        lambda *a, **k: types.SimpleNamespace(spec=spec_of(), positions=(0,)),
    )
    assert cli.main(["eval", "x.safetensors", "--tasks", "coral"]) == 2
    assert "pip install lm-eval" in capsys.readouterr().err
