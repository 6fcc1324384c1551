"""Problems of a RUN.toml, each reported with its line, key and remedy.

Exceptions:

    ValueError
      SpecError     `problems` lists every problem found
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

_Known = Mapping[str, list[str]]  # the keys of each section


@dataclass(frozen=True, kw_only=True)
class SpecProblem:
    """One problem of a spec: its place and what was expected."""

    line: int | None
    path: str
    message: str

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return where + (f"{self.path}: " if self.path else "") + self.message


class SpecError(ValueError):
    """The run spec cannot be used; `problems` lists everything that is wrong with it."""

    def __init__(self, problems: list[SpecProblem], *, source: str = "run spec") -> None:
        self.problems = problems
        self.source = source
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n  ".join([f"{source}: {count}", *map(str, problems)]))


def toml_problem(error: tomllib.TOMLDecodeError) -> SpecProblem:
    """Return the line at which a text stops being TOML, and why."""
    # The exception has the line as an attribute only since Python 3.14.
    found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
    message = f"not valid TOML: {str(error).split(' (at ')[0]}"
    return SpecProblem(line=int(found[1]) if found else None, path="", message=message)


def key_lines(text: str) -> dict[str, int]:
    """Map 'section' and 'section.key' to line numbers, as far as a simple scan finds them."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([\w.\"-]+)\s*\]", line):
            section = header[1]
            lines.setdefault(section, number)
        elif key := re.match(r"\s*([\w.\"-]+)\s*=", line):
            lines.setdefault(f"{section}.{key[1]}" if section else key[1], number)
    return lines


def problems_of(
    error: ValidationError, schema: type[BaseModel], lines: Mapping[str, int]
) -> list[SpecProblem]:
    """Translate pydantic's findings, with the line of each key if it is known."""
    known = {name: _keys(info.annotation) for name, info in schema.model_fields.items()}
    found: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"][:2])
        message = _message(item, known)
        if message not in found.setdefault(path, []):
            found[path].append(message)
    return [
        SpecProblem(
            # A missing key has no line of its own; its section has.
            line=lines.get(path) or lines.get(path.split(".")[0]),
            path=path,
            message=" or ".join(messages),
        )
        for path, messages in found.items()
    ]


def _keys(annotation: object) -> list[str]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return list(annotation.model_fields)
    return []


def _message(item: Mapping[str, Any], known: _Known) -> str:
    loc, value = item["loc"], item["input"]
    if item["type"] == "extra_forbidden":
        return _unknown_key(loc, known)
    if item["type"] == "model_type":
        return f"expected a section such as [{'.'.join(map(str, loc))}], got {value!r:.40}"
    text = str(item["msg"]).removeprefix("Value error, ")
    text = text.replace("Input should be", "expected", 1)
    if len(loc) == 0 or "got " in text:  # the message shows the value already: not twice
        return text
    shown = repr(value)
    return f"{text}, got {shown if len(shown) <= 80 else shown[:77] + '...'}"


def _unknown_key(loc: tuple[int | str, ...], known: _Known) -> str:
    name = str(loc[-1])
    if len(loc) == 1:
        return f"unknown section{_hint(name, known)}"
    elsewhere = (section for section, keys in known.items() if name in keys)
    belongs = next((f"; it belongs to [{section}]" for section in elsewhere), "")
    return f"unknown key{_hint(name, known[str(loc[0])]) or belongs}"


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""
