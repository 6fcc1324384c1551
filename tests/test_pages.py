"""The pages quote messages that exist and are wrapped; units and Dockerfiles use known options."""

import ast
import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from atoll.peer.cli import main as cli
from support.sources import parsed

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "docs" / "deploy"
PAGES = ["commands.md", "faults.md", "join.md", "organise.md", "troubleshooting.md"]
MARKDOWN = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
WIDTH = 88  # of prose, as CONTRIBUTING.md asks


def texts_of_the_source():
    for folder in ("coordinator", "dht", "optim", "peer"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_each_quoted_message_is_in_the_source():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 10
    source = "\0".join(texts_of_the_source())
    pieces = [piece.strip() for message in messages for piece in message.split("…")]
    assert [piece for piece in pieces if piece not in source] == []


def prose_of(text):
    """Yield the numbered lines that are neither code, nor a table's, nor written by a benchmark."""
    is_fenced = is_written = is_indented = False
    before = ""
    for number, line in enumerate(text.splitlines(), start=1):
        is_indented = line.startswith("    ") and (is_indented or not before)
        before = line
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        elif line.startswith("<!-- "):
            is_written = not line.startswith("<!-- end")
        elif not (is_fenced or is_written or is_indented or line.lstrip().startswith("|")):
            yield number, line


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_wrapped(path):
    lines = prose_of(path.read_text(encoding="utf-8"))
    assert [f"{path.name}:{number}" for number, line in lines if len(line) > WIDTH] == []


def test_prose_is_told_from_code_and_tables():
    page = ["one", "```", "code", "```", "| a |", "", "    code", "    more", "- two", "    three"]
    page += ["<!-- rows of x.json -->", "row", "<!-- end of rows -->", "four"]
    assert [line for _, line in prose_of("\n".join(page))] == [
        "one",
        "",
        "- two",
        "    three",
        "four",
    ]


@pytest.mark.parametrize("page", PAGES)
def test_links_of_the_pages_lead_somewhere(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (ROOT / "docs" / target).exists(), target


def understood(words):
    """Fail unless the command line accepts the words."""
    program, command, *_ = words
    assert Path(program).name == "atoll"
    cli._parser(cli._load(command), command).parse_args(words[1:])


@pytest.mark.parametrize("name", ["atoll-peer", "atoll-coordinator"])
def test_a_unit_starts_a_command_that_exists(name):
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string((DEPLOY / f"{name}.service").read_text(encoding="utf-8"))
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    words = shlex.split(unit["Service"]["ExecStart"])
    understood(words)
    assert words[words.index("--state-dir") + 1] == f"%S/{unit['Service']['StateDirectory']}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
@pytest.mark.parametrize("name", ["atoll-peer", "atoll-coordinator"])
def test_systemd_accepts_a_unit(name, tmp_path):
    text = (DEPLOY / f"{name}.service").read_text(encoding="utf-8")
    # Neither Atoll nor its user is installed where the tests run.
    text = re.sub("^ExecStart=.*$", "ExecStart=/bin/true", text, flags=re.MULTILINE)
    text = re.sub("^User=.*$", "User=root", text, flags=re.MULTILINE)
    (tmp_path / f"{name}.service").write_text(text, encoding="utf-8")
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / f"{name}.service")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("name", ["peer", "coordinator"])
def test_a_dockerfile_starts_a_command_that_exists(name):
    text = (DEPLOY / f"{name}.Dockerfile").read_text(encoding="utf-8")
    lines = dict(line.split(" ", 1) for line in text.splitlines() if re.match(r"[A-Z]+ ", line))
    understood(json.loads(lines["ENTRYPOINT"]) + json.loads(lines["CMD"]))
