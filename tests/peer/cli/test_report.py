"""`atoll report`, and a coordinator's directory in the place of an invite."""

import json
from pathlib import Path

import pytest

from support.commands import refused
from support.organiser import end_a_run, tiny_spec


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The state directory of a coordinator that has ended."""
    path = tmp_path_factory.mktemp("ended") / "state"
    end_a_run(path, tiny_spec(), rounds=5)
    return path


def test_a_directory_takes_the_place_of_an_invite(atoll, ended):
    status = json.loads(atoll("status", ended, "--json").out)
    assert (status["run_name"], status["state"], len(status["history"])) == ("tiny", "waiting", 5)
    rounds = json.loads(atoll("rounds", ended, "--last", 2, "--json").out)["rounds"]
    assert [row["position"] for row in rounds] == [4, 5]
    drawn = atoll("dashboard", ended, "--screenshot", "run.svg")
    assert drawn.code == 0
    assert "tiny" in Path("run.svg").read_text()


@pytest.mark.parametrize("of", ["directory", "invite"])
def test_a_report_is_one_file(of, atoll, ended, invite):
    told = atoll("report", ended if of == "directory" else invite, "--out", "page.html")
    assert (told.code, told.out) == (0, "page.html\n")
    text = Path("page.html").read_text()
    assert text.startswith("<!doctype html>")
    assert ("svg+xml" in text) == (of == "directory")
    assert [path.name for path in Path().iterdir()] == ["page.html"]


def test_two_runs_are_compared_on_one_page(atoll, ended):
    assert atoll("report", ended, ended, "--out", "page.html").code == 0
    text = Path("page.html").read_text()
    assert text.count("svg+xml") == 3
    assert "tiny (1) and tiny (2)" in text
    assert ">training loss<" in text


def test_more_runs_than_colours_are_refused(atoll, ended):
    told = atoll("report", *[ended] * 5)
    assert told.code == 2
    assert "expected at most 4 runs, got 5" in told.err


@pytest.mark.parametrize(
    ("out", "message"),
    [("page.pdf", "must end in .html"), ("absent/page.html", "create it first")],
)
def test_a_page_that_cannot_be_written_is_refused(out, message, atoll, ended):
    told = atoll("report", ended, "--out", out)
    assert told.code == 2
    assert message in told.err


def test_a_folder_of_something_else_is_refused(atoll, tmp_path):
    told = atoll("status", tmp_path)
    assert told.code == 2
    assert "state directory of a coordinator" in told.err


def test_two_runs_stand_side_by_side(atoll, invite, ended):
    out = atoll("status", invite, ended).out
    rows = [line.split("  ") for line in out.splitlines()[1:]]
    assert "tiny (1)" in out.splitlines()[0] and "tiny (2)" in out.splitlines()[0]
    told = {row[1]: [cell.strip() for cell in row[2:] if cell] for row in rows}
    assert told["tokens"][0] == "0" and told["tokens"][1].endswith("k")
    assert "training loss" in told and "sent by all peers" in told
    runs = json.loads(atoll("status", invite, ended, "--json").out)
    assert [len(run["history"]) for run in runs] == [0, 5]
    assert runs[0]["run_id"] == invite.run_id.hex() != runs[1]["run_id"]


def test_of_several_runs_none_is_shown_if_one_is_wrong(atoll, ended):
    assert "expected at most 4 runs, got 5" in refused(atoll("status", *[ended] * 5))
    assert "starts with 'atoll1'" in refused(atoll("status", ended, "nothing", "--json"))
