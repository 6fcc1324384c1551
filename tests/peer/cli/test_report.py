"""`atoll report`, and a coordinator's directory in the place of an invite."""

import json
from pathlib import Path

import pytest

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
