"""Interface of methods: what is sent, over which fragments, when, and how an update is applied.

A method is a frozen dataclass. Its fields are what a run agrees upon, and its spec string names it
completely (`parse(method.spec) == method`). It has two sides:

    the log's     `fragments`, `reduction`, `apply`, and how contributions are weighed and encoded:
                  pure functions that a reducer calls; nothing in them depends on a model
    a peer's      `worker`: the object in the training loop, which says what is sent and when, and
                  how the peer's own parameters follow the common ones

Neither knows how bytes travel. A method is one file in this folder:

    class Mine(DiLoCo): ...                 # a `Worker`; or DiLoCo itself

    @register
    @dataclass(frozen=True, kw_only=True)
    class MyMethod(Method):
        name: ClassVar[str] = "mine"
        worker_class: ClassVar[type[Worker]] = Mine
        def apply(self, state, update_F, *, fragment, lr, momentum): ...

Options of these names mean the same in all methods that have them, so this base checks and reads
them: lr and momentum of the outer step, the format of the state that it keeps, decay of the
weights, tau, the inner steps that a reduction travels.

Spec strings, as `streaming(count=4, tau=5, codec=int4)`, have this grammar::

    spec := name | name "(" key "=" value ("," key "=" value)* ")"
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import typing
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.compression import Codec, CodecError, Int8, PowerSGD
from atoll.compression import parse as parse_codec
from atoll.compression.registry import split_top
from atoll.compression.sparse import Sparse
from atoll.optim.methods.worker import Worker
from atoll.optim.reducer import Reducer
from atoll.optim.reduction import lowrank
from atoll.optim.reduction.contribution import CLIP_AT, WeightRule
from atoll.optim.state import halves
from atoll.optim.state.fragments import Fragment, by_tensor, whole
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.updates import dense

Shape = Literal["mean", "gather", "low-rank", "pairs"]
InnerName = Literal["adamw", "muon", "lion", "sgd"]
StateFormat = Literal["fp32", "bf16"]

MAX_SPEC_CHARS = 1_000  # longer than any sensible spec; bounds the work on a hostile one


class MethodError(ValueError):
    """An unknown method or option, or a value that it can't have."""


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """Options that all methods have, and what a reducer and a training loop ask of them."""

    name: ClassVar[str]
    """Name in specs and in RUN.toml."""

    moments: ClassVar[int] = 1
    """Vectors of the model's length that the outer step keeps from one update to the next."""

    inner: ClassVar[InnerName] = "adamw"
    """The inner optimizer that the paper takes."""

    factors: ClassVar[bool] = True
    """True if `powersgd`'s factors are reduced one after the other (`lowrank`); else it is a codec
    like any other, for methods that cut the model their own way."""

    every_step: ClassVar[bool] = False
    """True if a window is always one step, because gradients are sent."""

    shape: ClassVar[Shape] = "mean"
    """The `reduction`, unless the codec asks for another."""

    moves_values_apart: ClassVar[bool] = False
    """True if `apply` computes each value from the same value of state and update alone, so that
    pieces of a fragment may be applied one after another."""

    worker_class: ClassVar[type[Worker]]
    """The peer's side."""

    codec: Codec = field(default_factory=Int8)
    """Encodes what is sent, and a mean that is sent back."""

    feedback: float = 1.0
    """Share of what the codec lost that comes back (error feedback); 0 for none."""

    weights: WeightRule = "rate"
    """Rule by which contributions are weighed."""

    clip_at: float = CLIP_AT
    """Norms are clipped to so many medians; 0 for no clipping."""

    def __post_init__(self) -> None:
        """Check the options; methods check their own after these.

        Raises:
            MethodError: when one is out of range.
        """
        require(0 <= self.feedback <= 1, "a feedback from 0 to 1", self.feedback)
        require(0 <= self.clip_at < math.inf, "a clip_at of at least 0", self.clip_at)
        lr, momentum = self.scalars(0.0)
        decay, tau = getattr(self, "decay", 0.0), getattr(self, "tau", 0)
        state = getattr(self, "state", "fp32")
        require(0 <= lr < math.inf, "an outer rate of at least 0", lr)
        require(0 <= momentum < 1, "a momentum from 0 to below 1", momentum)
        require(0 <= decay < math.inf, "a decay of at least 0", decay)
        require(tau >= 0, "a tau of at least 0", tau)
        require(state in typing.get_args(StateFormat), "a state of fp32 or bf16", state)

    @property
    def reduction(self) -> Shape:
        """Return the rule by which contributions become an update.

        "mean": each part's owner encodes the mean once. "gather": everyone decodes everyone's
        contribution. "low-rank": factors of matrices, in two exchanges. "pairs": by gossip, on
        states of one's own.
        """
        by_factors = self.shape == "mean" and self.factors and isinstance(self.codec, PowerSGD)
        return "low-rank" if by_factors else self.shape

    @property
    def residual(self) -> float:
        """Return the share of a loss that comes back; all of it with factors, as in PowerSGD."""
        return 1.0 if self.reduction == "low-rank" else self.feedback

    @property
    def rank(self) -> int:
        """Return the rank of the factors; 0 if nothing is reduced by factors."""
        codec = self.codec
        return codec.rank if isinstance(codec, PowerSGD) and self.reduction == "low-rank" else 0

    @property
    def logged(self) -> bool:
        """Return whether a joiner needs the common state only, so that a log can hold it."""
        return self.reduction in ("mean", "gather", "low-rank")

    @property
    def divides_by(self) -> Literal["all", "senders"]:
        """Return whose weights the mean of gathered contributions is divided by, value by value."""
        return "all"

    def fragments(self, layout: Layout) -> tuple[Fragment, ...]:
        """Return the fragments: by default one, cut by tensor if the codec depends on shapes."""
        if self.rank:
            return (lowrank.tensors(layout),)
        return (whole(layout) if self.codec.elementwise else by_tensor(layout),)

    @property
    def memory_dtype(self) -> torch.dtype:
        """Return the format of `OuterState.memory_M`."""
        return torch.bfloat16 if getattr(self, "state", "fp32") == "bf16" else torch.float32

    def memory_numel(self, layout: Layout) -> int:
        """Return the number of values in `OuterState.memory_M`, the memory of the outer step."""
        return self.moments * layout.numel + lowrank.warm_numel(layout, self.rank)

    def genesis(self, layout: Layout, params_N: Tensor) -> OuterState:
        """Return the state at position 0.

        Raises:
            StateError: when the parameters are of another length.
            NotFinite: when they hold NaN or infinity.
        """
        memory_M = torch.zeros(self.memory_numel(layout), dtype=self.memory_dtype)
        if self.rank:
            # The first Q is a fixed hash, not a draw: every replica begins with the same bits.
            warm_K = lowrank.cold(layout, self.rank)
            halves.store_(memory_M[memory_M.numel() - warm_K.numel() :], warm_K)
        return OuterState.genesis(layout, params_N, memory_M)

    @classmethod
    def defaults_for(cls, *, rounds: int, inner_steps: int, peers: int) -> dict[str, object]:
        """Return options whose best values follow from the run; none by default.

        Args:
            rounds: of the run, 0 for one without an end.
            inner_steps: H.
            peers: peers that are expected.
        """
        return {}

    def hidden_steps(self, inner_steps: int) -> int:
        """Return the inner steps during which a reduction may be in flight, for windows of H."""
        return int(getattr(self, "tau", 0))

    @property
    def window_vectors(self) -> int:
        """Return the model-sized vectors kept per window besides the contribution."""
        return 0

    def scalars(self, inner_lr: float) -> tuple[float, float]:
        """Return learning rate and momentum of an outer step, as its entry carries them.

        Args:
            inner_lr: inner learning rate at the end of the window, for methods without an `lr`.
        """
        return getattr(self, "lr", inner_lr), getattr(self, "momentum", 0.0)

    @abstractmethod
    def apply(
        self, state: OuterState, update_F: Tensor, *, fragment: Fragment, lr: float, momentum: float
    ) -> OuterState:
        """Return the next state, bit-identical on every device (`atoll.optim.state.outer_step`).

        Args:
            state: left as it is, unless it gives way.
            update_F: the decoded update of the fragment.
            fragment: one of `fragments`, or some pieces of it (`moves_values_apart`).
            lr: learning rate of the entry.
            momentum: of the entry.
        """

    def apply_sparse(
        self, state: OuterState, update: Sparse, *, fragment: Fragment, lr: float, momentum: float
    ) -> OuterState:
        """Apply an update that is mostly 0; a hook for methods that can exploit that."""
        return self.apply(state, dense(update), fragment=fragment, lr=lr, momentum=momentum)

    def worker(
        self,
        model: nn.Module,
        inner: Optimizer | Sequence[Optimizer],
        reducer: Reducer,
        *,
        inner_steps: int,
    ) -> Worker:
        """Join the reducer and return the object that replaces `inner` in the training loop.

        Args:
            model: any module; its trainable parameters sync.
            inner: optimizer over these parameters, or several.
            reducer: of a group that runs this method.
            inner_steps: H; methods that send gradients take 1.

        Raises:
            MethodError: when a reduction would travel for longer than a window.
            ValueError, LayoutError: as `Worker`.
        """
        steps = 1 if self.every_step else inner_steps
        delay = self.hidden_steps(steps)
        if delay > steps:
            raise MethodError(
                f"{self.name}: expected windows of at least tau={delay} inner steps, got {steps}; "
                f"take tau={steps} or less, or longer windows"
            )
        kind: Any = self.worker_class  # type checkers see a circle of imports as two classes
        worker: Worker = kind(model, inner, reducer, inner_steps=steps, delay=delay, method=self)
        return worker

    @cached_property
    def spec(self) -> str:
        """Return the string that `parse` turns back into this method."""
        changed = [
            f"{f.name}={value.spec if isinstance(value, Codec) else value}"
            for f in fields(self)
            if (value := getattr(self, f.name))
            != (f.default if f.default_factory is MISSING else f.default_factory())
        ]
        return f"{self.name}({', '.join(changed)})" if changed else self.name


def require(condition: bool, expected: str, got: object) -> None:
    """Refuse an option.

    Raises:
        MethodError: unless the condition holds.
    """
    if not condition:
        raise MethodError(f"expected {expected}, got {got}")


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
    """Return the names of all methods, sorted."""
    return sorted(_METHODS)


def parse(spec: str, **options: object) -> Method:
    """Return the method that `spec` names, with `options` instead of the spec's or the defaults.

    Options are values of their fields' types, or texts as in a spec.

    Raises:
        MethodError: an unknown name or option, or a value that it can't have; it names the known
            ones.
        CodecError: a codec that does not exist.
    """
    method, items = _read(spec)
    return _construct(method, items | options)


def given(spec: str) -> frozenset[str]:
    """Return the names of the options that a spec sets.

    Raises:
        MethodError: an unknown name, or no spec.
    """
    return frozenset(_read(spec)[1])


def has_option(spec: str, name: str) -> bool:
    """Return whether a spec's method has an option.

    Raises:
        MethodError: an unknown name, or no spec.
    """
    return name in [field.name for field in fields(_read(spec)[0])]


def defaults_for(spec: str, *, rounds: int, inner_steps: int, peers: int) -> dict[str, object]:
    """Return options of a spec's method that follow from the run (`Method.defaults_for`).

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


# Each lookup compiles every annotation; advice on a run builds methods and codecs by the thousand.
_kinds = functools.cache(typing.get_type_hints)


def _construct(method: type[Method], options: dict[str, object]) -> Method:
    kinds = _kinds(method)
    known = [f.name for f in fields(method)]
    unknown = [key for key in options if key not in known]
    if unknown:
        raise MethodError(
            f"{method.name}: expected options among {', '.join(known)}; got {', '.join(unknown)}"
        )
    return method(**{key: _value(key, value, kinds[key]) for key, value in options.items()})


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
        try:
            return int(value) if kind is int else float(value)
        except ValueError:
            raise MethodError(f"expected a number in {key}, got {value!r}") from None
    return value


def _choice(key: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise MethodError(f"expected {key} to be one of {', '.join(allowed)}; got {value!r}")
    return value
