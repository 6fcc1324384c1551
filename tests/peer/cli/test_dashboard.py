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


def test_a_replay_needs_a_terminal(atoll, invite):
    told = refused(atoll("dashboard", "--replay", invite))
    assert "--replay needs a terminal; `atoll rounds` lists the rounds" in told


def test_a_replay_from_a_round_that_is_not_there_is_refused(atoll, invite):
    told = refused(atoll("dashboard", "--replay", invite, "--from", "7", "--screenshot", "r.svg"))
    assert "--from must be a round of 0 to 0, got 7" in told


def test_a_picture_of_a_replay_needs_no_terminal(atoll, invite, tmp_path):
    result = atoll("dashboard", "--replay", invite, "--screenshot", "run.svg")
    assert (result.code, result.err) == (0, "")
    assert "replay" in (tmp_path / "run.svg").read_text()


def test_a_peer_that_nobody_is_called_is_refused(atoll, invite):
    told = refused(atoll("dashboard", invite, "--me", "nobody", "--plain"))
    assert "--me 'nobody': no peer, or several, have that name; peers: none yet" in told
