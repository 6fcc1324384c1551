"""`atoll dashboard --screenshot`: a picture of a run."""

from support.commands import INVITE, refused


def test_no_picture_is_drawn_of_a_run_that_does_not_answer(atoll, tmp_path):
    result = atoll("dashboard", INVITE, "--screenshot", "run.svg")
    assert (result.code, result.out) == (1, "")
    assert "connection refused" in result.err
    assert not (tmp_path / "run.svg").exists()


def test_a_picture_of_another_format_is_refused(atoll):
    assert "must end in .svg" in refused(atoll("dashboard", INVITE, "--screenshot", "run.png"))


def test_a_picture_of_the_run_needs_no_terminal(atoll, invite, tmp_path):
    result = atoll("dashboard", invite, "--screenshot", "run.svg")
    assert (result.code, result.err) == (0, "")
    drawn = (tmp_path / "run.svg").read_text()
    assert drawn.startswith("<svg")
    assert "WAITING" in drawn


def test_a_picture_that_cannot_be_written_is_refused(atoll, invite):
    told = refused(atoll("dashboard", invite, "--screenshot", "nowhere/run.svg"))
    assert "nowhere/run.svg" in told
