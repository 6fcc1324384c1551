"""`atoll demo`: what is wrong is refused before anything starts or is overwritten."""

import pytest

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
