"""Spec strings of methods: `streaming(fragments=4, tau=5, codec=int4)`.

Grammar::

    spec := name | name "(" key "=" value ("," key "=" value)* ")"
"""

import difflib
import re
import typing
from dataclasses import fields
from functools import cache
from typing import TypeVar

from atoll.compression import Codec, CodecError
from atoll.compression import parse as parse_codec
from atoll.compression.registry import split_top
from atoll.optim.methods.base import Method, MethodError

MAX_SPEC_CHARS = 1_000  # longer than any sensible spec; bounds the work on a hostile one

_METHODS: dict[str, type[Method]] = {}
_SPEC = re.compile(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", re.DOTALL)
_M = TypeVar("_M", bound=type[Method])


def register(method: _M) -> _M:
    """Make a method known to `parse`; a class decorator."""
    if method.name in _METHODS:
        raise ValueError(f"method {method.name!r} is taken")
    _METHODS[method.name] = method
    return method


def names() -> list[str]:
    """Names of all methods, sorted."""
    return sorted(_METHODS)


def parse(spec: str, **options: object) -> Method:
    """The method that `spec` names, with `options` in place of the spec's or the defaults.

    Options are values of their fields' types, or texts as in a spec.

    Raises:
        MethodError: an unknown name or option, or a value that it can't have; it names the known
            ones.
        CodecError: a codec that does not exist.
    """
    method, items = _read(spec)
    return _construct(method, items | options)


def given(spec: str) -> frozenset[str]:
    """Names of the options that a spec sets.

    Raises:
        MethodError: an unknown name, or no spec.
    """
    return frozenset(_read(spec)[1])


def defaults_for(spec: str, *, rounds: int, inner_steps: int, peers: int) -> dict[str, object]:
    """Options of a spec's method whose best values follow from the run (`Method.defaults_for`).

    Raises:
        MethodError: an unknown name, or no spec.
    """
    return _read(spec)[0].defaults_for(rounds=rounds, inner_steps=inner_steps, peers=peers)


def _read(spec: str) -> tuple[type[Method], dict[str, object]]:
    if len(spec) > MAX_SPEC_CHARS:
        raise MethodError(f"expected a spec of at most {MAX_SPEC_CHARS} characters, got more")
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise MethodError(f"expected name or name(key=value, ...), got {spec!r}")
    if match[1] not in _METHODS:
        near = difflib.get_close_matches(match[1], names(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise MethodError(
            f"expected one of the methods {', '.join(names())}; got {match[1]!r}{hint}"
        )
    method = _METHODS[match[1]]
    return method, _items(method, match[2] or "")


def _items(method: type[Method], text: str) -> dict[str, object]:
    try:
        items = [item for item in split_top(text, ",") if item.strip()]
    except CodecError as error:
        raise MethodError(f"{method.name}: {error}") from None
    found: dict[str, object] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or key.strip() in found:
            raise MethodError(f"{method.name}: expected key=value, each key once; got {item!r}")
        found[key.strip()] = value.strip()
    return found


def _construct(method: type[Method], options: dict[str, object]) -> Method:
    kinds = _kinds(method)
    known = [f.name for f in fields(method)]
    unknown = [key for key in options if key not in known]
    if unknown:
        raise MethodError(
            f"{method.name}: expected options among {', '.join(known)}; got {', '.join(unknown)}"
        )
    return method(**{key: _value(key, value, kinds[key]) for key, value in options.items()})


@cache
def _kinds(method: type[Method]) -> dict[str, object]:
    """Types of a method's options."""
    return typing.get_type_hints(method)


def _value(key: str, value: object, kind: object) -> typing.Any:  # noqa: ANN401 - by the field
    if not isinstance(value, str):
        return value
    if kind is Codec:
        return parse_codec(value)
    if typing.get_origin(kind) is typing.Literal:
        return _choice(key, value, typing.get_args(kind))
    if kind is bool:
        return _choice(key, value, ("True", "False")) == "True"
    if kind in (int, float):
        return _number(key, value, kind)
    return value


def _choice(key: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise MethodError(f"expected {key} to be one of {', '.join(allowed)}; got {value!r}")
    return value


def _number(key: str, value: str, kind: object) -> float:
    try:
        return int(value) if kind is int else float(value)
    except ValueError:
        raise MethodError(f"expected a number in {key}, got {value!r}") from None
