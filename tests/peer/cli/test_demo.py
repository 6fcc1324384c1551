"""`atoll demo`: what is wrong is refused before anything starts or is overwritten."""

import pytest

from atoll.peer.cli import main as cli
from atoll.peer.cli.demo import demo_spec
from atoll.peer.training.opening import slices_of
from atoll.peer.training.permission import Allowed
from support.commands import contents, refused


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--preset gigantic", "the presets are nano"),
        ("--codec int9", "expected one of the codecs"),
        ("--method sgd", "expected one of the methods"),
        ("--device abacus", "expected auto, cuda, mps or cpu"),
        ("--data no-such-folder", "no-such-folder"),
        ("--data empty", "holds no text; name a file or folder with text"),
        ("--chaos --peers 1", "expected at least 2 peers, got 1"),
        ("--chaos --rounds 4", "expected at least 5 rounds, got 4"),
        ("--rounds many", "expected a whole number above 0, got 'many'"),
        ("--peers 0", "expected a whole number above 0, got '0'"),
        ("--shares 1,0", "expected shares above 0 and at most 1"),
        ("--shares all", "expected numbers such as 1,0.5, got 'all'"),
        ("--windows long", "outer.windows"),
        ("--stages 3 --peers 2", "each stage needs a peer of its own, got 2 peers"),
        ("--stages 2 --baseline", "omit --baseline or --stages"),
        ("--stages 2 --method noloco", "topology.stages"),
        ("--stages 0", "expected a whole number above 0, got '0'"),
    ],
)
def test_a_demo_that_cannot_be_is_refused_before_anything_starts(
    atoll, tmp_path, arguments, expected
):
    (tmp_path / "empty").mkdir()
    assert expected in refused(atoll("demo", "--out", "out", *arguments.split()))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["file", "file/deeper"])
def test_a_demo_with_a_file_in_its_way_is_refused(atoll, tmp_path, out):
    (tmp_path / "file").write_text("mine")
    assert "choose another with --out" in refused(atoll("demo", "--out", out))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_demo_overwrites_nothing(atoll, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    assert "choose another with --out" in refused(atoll("demo", "--out", "out"))
    assert contents(tmp_path / "out") == {tmp_path / "out" / "thesis.tex": b"mine"}


def spec_of(*words):
    return demo_spec(cli._parser(cli._load("demo"), "demo").parse_args(["demo", *words]))


@pytest.mark.parametrize(("stages", "blocks"), [(2, 3), (3, 5), (6, 11)])
def test_each_stage_of_a_demo_has_two_slices_or_more(stages, blocks):
    spec = spec_of("--stages", str(stages), "--peers", "6")
    known = slices_of(spec, 256, Allowed())
    assert len(known) == blocks + 2
    assert min(map(len, known.cut(stages))) >= 2
    assert spec.round.min_peers == 6


def test_a_pipeline_has_several_microbatches_a_step_and_as_many_tokens():
    dense, staged = spec_of(), spec_of("--stages", "3")
    assert staged.inner.grad_accumulation > 1 == dense.inner.grad_accumulation
    assert staged.step_tokens == dense.step_tokens
    assert dense.model.overrides == {} and dense.modules == ("",)
    assert spec_of("--stages", "2", "--preset", "mini").model.overrides == {}
