"""Spec strings: the names of all codecs and their parameters.

Grammar::

    spec   := term ("+" term)*              "topk(k=64)+2bit": the left one's values in the right
    term   := name | name "(" item ("," item)* ")"
    item   := spec | key "=" value          "zstd(int8, level=9)", "mixed(*.bias=fp16, *=int8)"
"""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

from atoll.compression.base import Codec, CodecError

MAX_SPEC_CHARS = 1_000  # longer than any sensible spec; bounds the work on a hostile one
MAX_DEPTH = 8  # of codecs inside one another; bounds the parser's recursion on a hostile spec

_CODECS: dict[str, type[Codec]] = {}
_TERM = re.compile(r"([\w-]+)\s*(?:\((.*)\))?", re.DOTALL)
_C = TypeVar("_C", bound=type[Codec])


def register(codec: _C) -> _C:
    """Make a codec class known to `parse`; a class decorator."""
    taken = {other.code for other in _CODECS.values()}
    if codec.name in _CODECS or codec.code in taken:
        raise ValueError(f"codec {codec.name!r} or its number {codec.code} is taken")
    _CODECS[codec.name] = codec
    return codec


def names() -> list[str]:
    """Return the names of all codecs, sorted."""
    return sorted(_CODECS)


def codec_class(name: str) -> type[Codec]:
    """Return the class called `name`.

    Raises:
        CodecError: no codec has this name.
    """
    if name not in _CODECS:
        raise CodecError(f"expected one of the codecs {', '.join(names())}; got {name!r}")
    return _CODECS[name]


def parse(spec: str) -> Codec:
    """Return the codec that `spec` names.

    Raises:
        CodecError: an unknown name or parameter, or a value out of range; it names the known ones.
    """
    if len(spec) > MAX_SPEC_CHARS:
        raise CodecError(f"expected a spec of at most {MAX_SPEC_CHARS} characters, got {len(spec)}")
    return _parse(spec, 0)


def _parse(spec: str, depth: int) -> Codec:
    if depth > MAX_DEPTH:
        raise CodecError(f"expected at most {MAX_DEPTH} codecs inside one another: {spec!r}")
    first, *rest = split_top(spec, "+")
    codec = _parse_term(first, depth)
    if not rest:
        return codec
    return _with_values(codec, _parse("+".join(rest), depth + 1))


def _with_values(codec: Codec, values: Codec) -> Codec:
    if not any(f.name == "values" for f in fields(codec)):
        raise CodecError(f"{codec.name!r} has no values to put in {values.spec!r}; use it alone")
    changes: dict[str, Any] = {"values": values}
    return replace(codec, **changes)


def _parse_term(term: str, depth: int) -> Codec:
    match = _TERM.fullmatch(term.strip())
    if match is None:
        raise CodecError(f"expected name or name(key=value, ...), got {term.strip()!r}")
    cls = codec_class(match[1])
    items = [item.strip() for item in split_top(match[2] or "", ",") if item.strip()]
    custom: Callable[..., Codec] | None = getattr(cls, "from_items", None)
    if custom is not None:
        return custom(items, lambda inner: _parse(inner, depth + 1))
    return _construct(cls, items, depth)


# Each lookup compiles every annotation; advice on a run builds codecs by the thousand.
_kinds = functools.cache(typing.get_type_hints)


def _construct(cls: type[Codec], items: list[str], depth: int) -> Codec:
    known = _kinds(cls)
    names_of = [f.name for f in fields(cls) if f.init]
    arguments: dict[str, Any] = {}
    for item in items:
        key, value = _key_value(item)
        if key not in names_of or key in arguments:
            raise CodecError(f"expected each of {names_of} of {cls.name!r} once, got {item!r}")
        arguments[key] = _convert(value, known[key], item, depth)
    try:
        return cls(**arguments)
    except TypeError as error:
        raise CodecError(f"{cls.name!r}: {error}; its parameters are {names_of}") from error


def _key_value(item: str) -> tuple[str, str]:
    """Split "key=value"; a bare spec is the codec that is wrapped."""
    match = re.match(r"(\w+)\s*=\s*(.*)", item, re.DOTALL)
    return (match[1], match[2]) if match else ("codec", item)


def _convert(value: str, kind: object, item: str, depth: int) -> object:
    if typing.get_origin(kind) is not None and type(None) in typing.get_args(kind):
        kind = next(arg for arg in typing.get_args(kind) if arg is not type(None))
    if kind is Codec:
        return _parse(value, depth + 1)
    if kind is bool and value in ("True", "False"):
        return value == "True"
    if kind in (int, float):
        try:
            return int(value) if kind is int else float(value)
        except ValueError as error:
            raise CodecError(f"expected a number in {item!r}") from error
    return value


def split_top(text: str, separator: str) -> list[str]:
    """Split at `separator` outside of brackets.

    Raises:
        CodecError: the brackets don't match.
    """
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth < 0:
            break
        if char == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth != 0:
        raise CodecError(f"expected matching brackets in {text!r}")
    return [*parts, text[start:]]
