"""`atoll sample`: settings and files that are refused, and pipelines."""

import json

import pytest

from support.commands import refused
from support.stages import save_stages, staged_spec


@pytest.mark.parametrize("arguments", [["--temperature", "-1"], ["--max-tokens", "-1"], []])
def test_sample_refuses_what_it_cannot_use(atoll, arguments):
    refused(atoll("sample", "no-such.safetensors", *arguments))


def test_sample_refuses_a_damaged_checkpoint(atoll, tmp_path):
    (tmp_path / "damaged.safetensors").write_bytes(b"\x08" + bytes(40))
    refused(atoll("sample", "damaged.safetensors"))


def test_a_pipeline_speaks_and_is_measured(atoll, tmp_path):
    save_stages(tmp_path / "checkpoints", staged_spec(), 2, 4)
    words = ["--device", "cpu", "--json"]
    spoken = atoll("sample", "checkpoints", "--prompt", "def ", "--max-tokens", "3", *words)
    assert spoken.code == 0 and json.loads(spoken.out)["prompt"] == "def "
    (tmp_path / "text.txt").write_text("the closed ring of a low coral island; " * 100)
    stage = "checkpoints/stage-3/reef-00000002.safetensors"
    measured = atoll("eval", stage, "--data", "text.txt", "--tokens", "64", *words)
    assert measured.code == 0 and json.loads(measured.out)["round"] == 2
