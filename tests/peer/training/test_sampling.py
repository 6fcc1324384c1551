import os

import pytest
import torch
from torch import nn

from atoll.coordinator.checkpoints import Checkpoint, CheckpointError, save_checkpoint
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.peer.errors import SetupError
from atoll.peer.training.data.load import ByteTokenizer
from atoll.peer.training.devices import Device
from atoll.peer.training.opening import build_model
from atoll.peer.training.sampling import SamplingOptions, generate, pick, sample

SPEC = RunSpec.from_dict(
    {
        "model": {"overrides": {"dim": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 24}},
        "data": {"seq_len": 16},
    }
)


def checkpoint(seed=0):
    model = build_model(SPEC, 256)
    layout = Layout.of(model)
    params_N = torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed))
    state = OuterState.genesis(layout, params_N)
    return Checkpoint(
        spec=SPEC, run_id=b"r" * 16, epoch=0, position=0, chain=bytes(32), state=state
    )


def text(source, prompt="def ", **options):
    return "".join(sample(source, prompt, SamplingOptions(**options), device="cpu"))


class Next(nn.Module):
    """Knows that each byte is followed by the next one, and nothing else."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(20.0))
        self.seen = []

    def forward(self, tokens_BT):
        self.seen.append(tokens_BT.tolist()[0])
        return nn.functional.one_hot((tokens_BT + 1) % 256, 256) * self.scale


def continued(prompt, model=None, **options):
    device = Device.choose("cpu")
    return list(
        generate(
            model or Next(),
            ByteTokenizer(),
            prompt,
            SamplingOptions(**options),
            context=4,
            device=device,
        )
    )


def test_a_text_is_continued_as_the_model_says():
    assert continued("ab", max_tokens=4, temperature=0) == ["c", "d", "e", "f"]
    assert continued("ab", max_tokens=4, temperature=0.5) == ["c", "d", "e", "f"]


def test_the_model_sees_no_more_than_its_context():
    model = Next()
    continued("abcdef", model, max_tokens=3, temperature=0)
    assert model.seen == [list(b"cdef"), list(b"defg"), list(b"efgh")]


def test_the_end_of_a_document_ends_the_text():
    start = ByteTokenizer().end_token
    assert start == 0
    assert continued("\xff".encode("latin-1").decode("latin-1"), max_tokens=0) == []
    pieces = continued("~", max_tokens=10, temperature=0)
    assert pieces[0] == "\x7f"

    class Ends(Next):
        def forward(self, tokens_BT):
            return nn.functional.one_hot(torch.zeros_like(tokens_BT), 256) * self.scale

    assert continued("ab", Ends(), max_tokens=10) == []


def test_an_empty_prompt_begins_a_document():
    model = Next()
    assert continued("", model, max_tokens=1, temperature=0) == ["\x01"]
    assert model.seen == [[0]]


def test_a_checkpoint_speaks_the_same_for_the_same_seed(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, checkpoint())
    first = text(path, seed=1, max_tokens=40)
    assert first and first == text(path, seed=1, max_tokens=40) == text(
        checkpoint(), seed=1, max_tokens=40
    )
    assert first != text(path, seed=2, max_tokens=40)


def test_a_folder_means_its_newest_checkpoint(tmp_path):
    for number in (1, 2):
        path = tmp_path / f"{9 - number}.safetensors"
        save_checkpoint(path, checkpoint(seed=number))
        os.utime(path, (number, number))
    assert text(tmp_path) == text(checkpoint(seed=2))


def test_a_folder_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="expected a checkpoint"):
        text(tmp_path)


def test_a_damaged_checkpoint_is_refused_before_any_text(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, checkpoint())
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="damaged"):
        sample(path, "def ", device="cpu")


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": -1}, {"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": -3}],
)
def test_numbers_below_zero_are_refused(wrong):
    with pytest.raises(SetupError, match=r"expected \w+ of at least 0, got"):
        SamplingOptions(**wrong)


def draws(logits_V, **options):
    generator = torch.Generator().manual_seed(0)
    return [pick(logits_V, SamplingOptions(**options), generator) for _ in range(400)]


def test_top_k_never_takes_an_unlikely_token():
    logits_V = torch.tensor([1.0, 3.0, 2.0, 0.0])
    assert set(draws(logits_V, top_k=2, temperature=2.0)) == {1, 2}
    assert set(draws(logits_V, top_k=1)) == {1}
    assert set(draws(logits_V, top_k=9, temperature=2.0)) == {0, 1, 2, 3}


def test_temperature_sharpens_the_choice():
    logits_V = torch.tensor([0.0, 1.0])
    cold, warm = (draws(logits_V, temperature=t).count(1) for t in (0.2, 5.0))
    assert cold > 390 and 180 < warm < 280
    assert set(draws(logits_V, temperature=0)) == {1}
