"""Blocks and commands of the pages, for the tests that run them."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.peer.cli import SUMMARIES, main

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> Iterator["Block"]:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    start = None
    for number, line in enumerate(lines, start=1):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        text = "\n".join(lines[start : number - 1]) + "\n"
        yield Block(page, start + 1, lines[start - 1][3:], text)
        start = None
    assert start is None, f"{page}:{start}: a block without an end"


def run(block: Block, namespace: dict) -> None:
    source = "\n" * (block.line - 1) + block.text  # so that a traceback names the page's line
    exec(compile(source, str(ROOT / block.page), "exec"), namespace)


def commands_in(page: str) -> list[str]:
    """The commands of `atoll` in a page's text, outside its blocks."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.findall(r"`(atoll [^`]+)`", text.replace("\n", " "))


def parse_command(command: str, programs: Mapping[str, str | None]) -> None:
    """Parse a command as `atoll` does.

    Args:
        command: one line of a shell.
        programs: scripts by the command of `atoll` that they pass their arguments to.
    """
    words = shlex.split(command, comments=True)
    if words[0] in programs:
        assert (ROOT / words[0]).stat().st_mode & 0o100
        words = ["atoll", programs[words[0]], *words[1:]]
    assert words[0] == "atoll"
    assert words[1] in (*SUMMARIES, None)
    if len(words) == 2:  # the name of a command, or a script that takes no options of one
        return
    parser = main._parser(main._load(words[1]), words[1])
    parser.parse_args(words[1:])
