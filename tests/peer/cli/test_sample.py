"""`atoll sample`: settings, files and invites that are refused, and pipelines."""

import json

import pytest

from support.commands import INVITE, refused
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


@pytest.mark.parametrize("wrong", ["-1", "nan", "soon"])
def test_a_wait_that_is_no_time_is_refused(atoll, wrong):
    assert "expected a number of seconds" in refused(atoll("sample", INVITE, "--wait", wrong))


def test_what_is_neither_checkpoint_nor_invite_is_refused(atoll):
    told = refused(atoll("sample", "no-such-folder", "--prompt", "def "))
    assert "or name a checkpoint" in told and "no such file exists" in told


def test_a_damaged_invite_is_named_as_one(atoll):
    assert "damaged invite" in refused(atoll("sample", INVITE[:-3]))


def test_the_invite_of_a_dense_run_names_what_works(atoll, invite):
    told = atoll("sample", invite.encode(), "--prompt", "def ")
    assert told.code == 2 and "Traceback" not in told.err
    assert "is no pipeline" in told.err and "atoll sample CHECKPOINT" in told.err


def test_a_coordinator_that_is_away_is_named(atoll):
    told = atoll("sample", INVITE, "--prompt", "def ")
    assert told.code == 1 and "Traceback" not in told.err and "127.0.0.1:9" in told.err
    assert told.err.startswith("joining run ")


def test_what_happens_on_the_way_is_json_for_programs(atoll):
    told = atoll("sample", INVITE, "--prompt", "def ", "--json")
    event = json.loads(told.err.splitlines()[0])
    assert (event["kind"], event["level"], event["code"]) == ("event", "info", "text.joining")
    assert event["fields"]["address"] == "127.0.0.1:9" and told.out == ""
