"""Which method, window and codec to take: what was measured here, and the pick that follows.

The gap to data parallel training grows with the window and depends on the method and its codec.
Both were measured in this project, the second in short runs; the tables below say where. What is
not in them is not recommended.

# H inner steps of a window
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from torch import nn

from atoll.coordinator.spec import RunSpec
from atoll.coordinator.spec_problems import SpecError
from atoll.optim import methods
from atoll.optim.fragments import FragmentError
from atoll.optim.layout import Layout
from atoll.optim.methods.base import Method
from atoll.peer.plan import Prediction, Setting, fragments_of, predict

GAP_BY_WINDOW = ((1, 0.0), (10, 0.024), (25, 0.039), (50, 0.053), (100, 0.063))
"""H, and the share by which `diloco` with int8 ends above data parallel: 0.93M parameters, 13.1M
tokens, 4 workers, one seed (docs/benchmarks/outer.json, the long table)."""

GAP_TO_DILOCO = {
    "ddp": -0.078,
    "diloco": 0.0,
    "diloco(codec=int4)": 0.0,
    "streaming(tau=2)": 0.018,
    "sparseloco(average=senders)": 0.056,
    "muloco": -0.008,
    "muloco(codec=2bit)": 0.055,
    "noloco": 0.070,
    "eager(lr=0.5, momentum=0.0)": 0.078,
    "co2(lr=0.5, momentum=0.0)": 0.102,
    "dlion": 0.265,
}
"""Share by which a method ends above `diloco` with int8 at the same H; 0.1M parameters, 4 workers
(docs/benchmarks/methods.json, docs/methods.md). The first six: 15 tokens a parameter, H=20; ddp and
muloco over three seeds, the others one. The rest: 4 tokens a parameter, H=10, one seed."""

WINDOWS = (10, 30, 50, 100)
LOSS_BY_TOKENS = 0.137
"""Loss falls with tokens to this power: data parallel, 0.93M parameters, ends at 1.455 after 2.5M
tokens and at 1.158 after 13.1M (docs/benchmarks/outer.json). It says what idle time costs."""
OUTER_KEYS = ("lr", "momentum")  # options with keys of their own in RUN.toml
COMPRESSION_KEYS = ("codec", "feedback")
LEVEL = 1.005  # seeds differ by as much: closer than this, traffic decides


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run, and what is known of it."""

    prediction: Prediction
    method: str
    """Spec; what it leaves open follows the run."""
    gap: float | None
    """Share by which its loss is expected above that of data parallel; None: not measured."""
    runs: bool
    """Whether this version runs it over the network."""


def measured_as(method: Method) -> str | None:
    """The row of the table that a method is; what a row leaves open follows the run."""
    for spec in GAP_TO_DILOCO:
        row, given = methods.parse(spec), methods.given(spec)
        left_open = {"lr", "momentum", "peers", "clip_norm"} - given
        decisive = [option.name for option in fields(row) if option.name not in left_open]
        if type(row) is type(method) and all(
            getattr(row, name) == getattr(method, name) for name in decisive
        ):
            return spec
    return None


def gap_of(method: Method, inner_steps: int) -> float | None:
    """Expected share above the loss of data parallel; None where nothing was measured.

    The gap by window is interpolated over the logarithm of H and ends with the last one measured.
    """
    row = measured_as(method)
    if row is None:
        return None
    relative = 1.0 + GAP_TO_DILOCO[row]
    if method.every_step:
        return relative / (1.0 + GAP_TO_DILOCO["ddp"]) - 1.0
    return (1.0 + _window_gap(inner_steps)) * relative - 1.0


def _window_gap(inner_steps: int) -> float:
    for (low, gap_low), (high, gap_high) in pairwise(GAP_BY_WINDOW):
        if inner_steps <= high:
            share = math.log(inner_steps / low) / math.log(high / low)
            return gap_low + share * (gap_high - gap_low)
    return GAP_BY_WINDOW[-1][1]


def as_run(spec: str, inner_steps: int) -> dict[str, dict[str, object]]:
    """What a RUN.toml says to run a method: fields of [outer] and [compression].

    Raises:
        MethodError: when there is no such method.
    """
    method, given = methods.parse(spec), methods.given(spec)
    own = {name: getattr(method, name) for name in given - {*OUTER_KEYS, *COMPRESSION_KEYS}}
    outer = {"method": type(method)(**own).spec, "inner_steps": inner_steps}
    outer |= {name: getattr(method, name) for name in OUTER_KEYS if name in given}
    compression = {name: getattr(method, name) for name in COMPRESSION_KEYS if name in given}
    if "codec" in compression:
        compression["codec"] = method.codec.spec
    return {"outer": outer, "compression": compression}


def runs_over_network(spec: str) -> bool:
    """Whether this version takes it in a RUN.toml."""
    try:
        RunSpec.from_dict(as_run(spec, 1))
    except SpecError:
        return False
    return True


def options(
    model: nn.Module, setting: Setting, *, windows: Sequence[int] = WINDOWS
) -> list[Option]:
    """All that was measured and fits the model, with every window, in the order of the table."""
    found = []
    for spec in GAP_TO_DILOCO:
        method, runs = methods.parse(spec), runs_over_network(spec)
        for inner_steps in (1,) if method.every_step else windows:
            if _fits(method, model, inner_steps):
                option = option_of(method, model, setting, inner_steps=inner_steps)
                found.append(replace(option, method=spec, runs=runs))
    return found


def _fits(method: Method, model: nn.Module, inner_steps: int) -> bool:
    """Whether a model has blocks enough for the fragments, and a window steps for the delay."""
    try:
        fragments_of(method, Layout.of(model))
    except FragmentError:
        return False
    return method.hidden_steps(inner_steps) <= inner_steps


def option_of(method: Method, model: nn.Module, setting: Setting, *, inner_steps: int) -> Option:
    """One way to run, of a method that does."""
    return Option(
        prediction=predict(method, model, setting, inner_steps=inner_steps),
        method=measured_as(method) or method.spec,
        gap=gap_of(method, inner_steps),
        runs=True,
    )


def expected(option: Option) -> float:
    """Loss at equal time, as a multiple of what data parallel without a network reaches."""
    gap = math.inf if option.gap is None else option.gap
    return float((1.0 + gap) * option.prediction.utilisation**-LOSS_BY_TOKENS)


def pick(known: Sequence[Option]) -> Option:
    """The one to take: the least expected loss at equal time; of those level, the least traffic.

    Raises:
        ValueError: when none runs over the network with a known gap.
    """
    able = [option for option in known if option.runs and option.gap is not None]
    if not able:
        raise ValueError("expected an option that was measured and runs over the network")
    level = LEVEL * min(expected(option) for option in able)
    near = [option for option in able if expected(option) <= level]
    return min(near, key=lambda o: o.prediction.sent_bytes / o.prediction.inner_steps)


def reason(option: Option) -> str:
    """A sentence about what was picked."""
    cost = option.prediction
    loss = "" if option.gap is None else f"; loss about {100 * option.gap:.1f}% above data parallel"
    return (
        f"Take {option.method}, H={cost.inner_steps}: peers compute "
        f"{100 * cost.utilisation:.0f}% of the time, {cost.sent_bytes / 1e6:.3g} MB a window{loss}."
    )
