"""Recommend a method, window and codec for a run, from measured losses.

The gap to data-parallel training grows with the window and with the number of peers, and depends on
the method and its codec. The gaps come from this project's own measurements, mostly short runs of
small models (`atoll.peer.lab.measured`). Options are compared by their loss at equal time, so idle
time and slow inner optimizers both count. Only measured methods are recommended, and another method
than `diloco` only if it is clearly better, or keeps peers at work and is not clearly worse.

# H inner steps per window, N parameters
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise

from torch import nn

from atoll.compression.sparse import SparseCodec
from atoll.coordinator.run.sections import InnerSection
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.spec_problems import SpecError
from atoll.optim import methods
from atoll.optim.inner import NEWTON_SCHULZ_STEPS, muon_groups
from atoll.optim.methods.base import Method
from atoll.optim.state.layout import Layout
from atoll.optim.state.pieces import FragmentError
from atoll.peer.lab.measured import GAP_BY_WINDOW, GAP_BY_WORKERS, METHODS, Measured
from atoll.peer.lab.plan import Prediction, Setting, predict, sizes_of
from atoll.peer.lab.simulation_settings import RATE_SHARES

PLAIN = "diloco"
WINDOWS = (10, 30, 50, 100)  # values of H to compare
LOSS_BY_TOKENS = 0.137
"""Loss falls with tokens to this power, which gives the cost of idle time: data-parallel training
of 0.93M parameters ends at 1.455 after 2.5M tokens and at 1.158 after 13.1M
(docs/benchmarks/outer.json)."""
OUTER_KEYS = ("lr", "momentum", "state")  # options with their own keys in RUN.toml
COMPRESSION_KEYS = ("codec", "feedback")
TUNED = {*OUTER_KEYS, "feedback", "peers", "clip_norm"}  # options that rows of one kind differ in
LEVEL = 1.005  # options whose losses are closer than this are ranked by traffic
CLEARLY = 1.02  # closer methods may be equal: few seeds, small models, short runs

AT_WORK = 0.95  # of the time; an owner whose machine waits for others takes it for broken

ALONE = (
    "A single peer exchanges nothing: use diloco with its defaults, so that others can join.",
    "Run this again with --peers and --mbit once you know them; a run keeps its settings.",
)

BY_SPEED = (
    'outer.windows = "deadline": machines are seldom equally fast, so a slow or fast peer takes '
    "half to twice as many steps in the time of one window; 'equal' gives all the same steps."
)


@dataclass(frozen=True, kw_only=True)
class RunOption:
    """One method and window, with its prediction and its measured gap."""

    prediction: Prediction
    method: str
    """Spec of the method; options that it leaves open follow the run."""
    gap: float | None
    """Expected fraction above the loss of data-parallel training; None if not measured."""
    runs: bool
    """True if this version can run it over the network."""
    slowed: float = 1.0
    """Time of an inner step, as a multiple of AdamW's."""


@dataclass(frozen=True, kw_only=True)
class MeasuredMethod:
    """A row of measured losses, with its spec parsed."""

    measured: Measured
    method: Method
    given: frozenset[str]
    """Options that the spec sets."""

    def covers(self, method: Method) -> bool:
        """Return whether `method` equals the row's in all options that the row decides."""
        left_open = TUNED - {"feedback"} - self.given
        decisive = [option.name for option in fields(self.method) if option.name not in left_open]
        return type(self.method) is type(method) and all(
            getattr(self.method, name) == getattr(method, name) for name in decisive
        )


@cache
def rows() -> tuple[MeasuredMethod, ...]:
    """Return all measured methods."""
    return tuple(
        MeasuredMethod(measured=row, method=methods.parse(row.spec), given=methods.given(row.spec))
        for row in METHODS
    )


def measured_as(method: Method) -> Measured | None:
    """Return the row that covers a method and sets most of its options; None if none covers it."""
    able = [row for row in rows() if row.covers(method)]
    best = max(able, key=lambda row: len(row.given), default=None)
    return None if best is None else best.measured


def gap_of(method: Method, inner_steps: int, peers: int) -> float | None:
    """Return the expected fraction above the loss of data-parallel training; None if not measured.

    This is the gap measured for several windows with four workers, times the method's loss with as
    many workers as there are peers relative to four. Both are interpolated over the logarithm of H
    and of peers, and are constant beyond the last measurement.
    """
    row = measured_as(method)
    if row is None or not is_alike(method, inner_steps, row.inner_steps):
        return None
    with_peers = 1.0 + workers_gap(method.name, peers)
    measured = 1.0 + workers_gap(method.name, row.workers)
    if method.every_step:
        gap = row.to_ddp
    else:
        gap = (1.0 + window_gap(inner_steps)) * (1.0 + row.to_diloco) - 1.0
    return (1.0 + gap) * with_peers / measured - 1.0


def is_alike(method: Method, inner_steps: int, measured: int) -> bool:
    """Return whether a gap measured with windows of `measured` steps applies to `inner_steps`.

    It does not apply to longer windows if a round carries only some of the values, because the
    rest waits for later rounds, nor to windows of which the reduction's delay is a larger part.
    """
    sparse = isinstance(method.codec, SparseCodec) or method.rank > 0
    later = (
        method.hidden_steps(inner_steps) * measured > method.hidden_steps(measured) * inner_steps
    )
    return not later and (not sparse or inner_steps <= measured)


def window_gap(inner_steps: int, measured: Sequence[tuple[int, float]] = GAP_BY_WINDOW) -> float:
    """Return the fraction by which `diloco` with windows of H ends above data-parallel training."""
    return _interpolated(inner_steps, measured)


def workers_gap(name: str, workers: int) -> float:
    """Return the fraction by which a method ends above data-parallel training with `workers`."""
    return _interpolated(workers, GAP_BY_WORKERS[name])


def _interpolated(at: int, measured: Sequence[tuple[int, float]]) -> float:
    for (low, gap_low), (high, gap_high) in pairwise(measured):
        if at <= high:
            share = math.log(at / low) / math.log(high / low)
            return gap_low + share * (gap_high - gap_low)
    return measured[-1][1]


def as_run(spec: str, inner_steps: int) -> dict[str, dict[str, object]]:
    """Return the fields of [inner], [outer] and [compression] in RUN.toml that select a method.

    Raises:
        MethodError: there is no such method.
    """
    method, given = methods.parse(spec), methods.given(spec)
    own = {name: getattr(method, name) for name in given - {*OUTER_KEYS, *COMPRESSION_KEYS}}
    outer = {"method": type(method)(**own).spec, "inner_steps": inner_steps}
    outer |= {name: getattr(method, name) for name in OUTER_KEYS if name in given}
    compression = {name: getattr(method, name) for name in COMPRESSION_KEYS if name in given}
    if "codec" in compression:
        compression["codec"] = method.codec.spec
    rate = InnerSection().lr * RATE_SHARES[method.inner]
    inner: dict[str, object] = {} if method.inner == "adamw" else {"lr": rate}
    return {"inner": inner, "outer": outer, "compression": compression}


def runs_over_network(spec: str) -> bool:
    """Return whether this version accepts the method in a RUN.toml."""
    shortest = max(1, methods.parse(spec).hidden_steps(1))
    try:
        RunSpec.from_dict(as_run(spec, shortest))
    except SpecError:
        return False
    return True


def options(
    model: nn.Module, setting: Setting, *, step_tokens: int, windows: Sequence[int] = WINDOWS
) -> list[RunOption]:
    """Return every measured method that fits the model, with every window.

    Args:
        model: model, which may be on the meta device.
        setting: peers, links, and the time of a step with AdamW.
        step_tokens: tokens of one inner step of a peer.
        windows: values of H for methods that have windows.
    """
    found = []
    for spec in contenders():
        method, runs = methods.parse(spec), runs_over_network(spec)
        for inner_steps in (1,) if method.every_step else windows:
            if _fits(method, model, inner_steps):
                option = option_of(
                    method, model, setting, step_tokens=step_tokens, inner_steps=inner_steps
                )
                found.append(replace(option, method=spec, runs=runs))
    return found


def contenders() -> list[str]:
    """Return the best measured spec of each method over its outer constants and feedback."""
    best: dict[object, Measured] = {}
    for row in rows():
        own = [getattr(row.method, o.name) for o in fields(row.method) if o.name not in TUNED]
        kind = (type(row.method), *own)
        best[kind] = min(best.get(kind, row.measured), row.measured, key=lambda m: m.to_diloco)
    return [row.spec for row in METHODS if row in best.values()]


def _fits(method: Method, model: nn.Module, inner_steps: int) -> bool:
    # The model needs enough blocks for the fragments, the window enough steps for the delay.
    try:
        sizes_of(method, Layout.of(model))
    except FragmentError:
        return False
    return method.hidden_steps(inner_steps) <= inner_steps


def option_of(
    method: Method, model: nn.Module, setting: Setting, *, step_tokens: int, inner_steps: int
) -> RunOption:
    """Return the option of a method that runs over the network; arguments as for `options`."""
    row, slowed = measured_as(method), slowed_by(method, model, setting, step_tokens)
    own = replace(setting, step_s=setting.step_s * slowed)
    return RunOption(
        prediction=predict(method, model, own, inner_steps=inner_steps),
        method=method.spec if row is None else row.spec,
        gap=gap_of(method, inner_steps, setting.peers),
        runs=True,
        slowed=slowed,
    )


def slowed_by(method: Method, model: nn.Module, setting: Setting, step_tokens: int) -> float:
    """Return the time of an inner step as a multiple of AdamW's, as timed or else computed.

    Forward and backward passes take 6 N operations per token. Muon takes 4 R R C + 2 R R R more in
    each step of its iteration on a matrix of R rows and C columns, R <= C, for any batch size. On
    a CPU this is within 10% of the time of steps of 0.9M and 11M parameters.
    """
    if method.inner != "muon":
        return 1.0
    if setting.muon_step_s is not None:
        return setting.muon_step_s / setting.step_s
    groups = muon_groups(model, weight_decay=0.0)
    matrices = [p for group in groups if group["kind"] == "muon" for p in group["params"]]
    sides = [sorted((len(p), p.numel() // len(p))) for p in matrices]
    iteration = sum(4 * rows**2 * columns + 2 * rows**3 for rows, columns in sides)
    passes = 6 * Layout.of(model).numel * step_tokens
    return float(1.0 + NEWTON_SCHULZ_STEPS * iteration / passes)


def expected(option: RunOption) -> float:
    """Return the loss at equal time, relative to data-parallel training without a network."""
    gap = math.inf if option.gap is None else option.gap
    pace = option.prediction.utilisation / option.slowed
    return float((1.0 + gap) * pace**-LOSS_BY_TOKENS)


def pick(known: Sequence[RunOption]) -> RunOption:
    """Return `diloco` with its best window, or an option that is clearly better at equal time.

    If peers would wait for more than a twentieth of the time with it, return the best option that
    keeps them at work instead, unless it is clearly worse.

    Raises:
        ValueError: no option runs over the network with a known gap.
    """
    able = [option for option in known if option.runs and option.gap is not None]
    if not able:
        raise ValueError("no option was measured and runs over the network")
    plain = [option for option in able if option.method == PLAIN]
    taken = _best(able)
    if plain and CLEARLY * expected(taken) >= expected(_best(plain)):
        taken = _best(plain)
    if taken.prediction.utilisation >= AT_WORK:
        return taken
    limit = CLEARLY * expected(taken)
    at_work = [o for o in able if o.prediction.utilisation >= AT_WORK and expected(o) <= limit]
    return _best(at_work) if at_work else taken


def _best(able: Sequence[RunOption]) -> RunOption:
    """Return the option of least traffic among those of about the least loss at equal time."""
    level = LEVEL * min(expected(option) for option in able)
    near = [option for option in able if expected(option) <= level]
    return min(near, key=lambda o: o.prediction.sent_bytes / o.prediction.inner_steps)


def reasons(option: RunOption, known: Sequence[RunOption]) -> tuple[str, str]:
    """Describe the picked option, and compare other windows and the best other method with it."""
    cost = option.prediction
    gap = "" if option.gap is None else f"; loss about {100 * option.gap:.1f}% above data parallel"
    gap += f"; a step takes {option.slowed:.1f} times AdamW's" if option.slowed > 1 else ""
    picked = (
        f"Take {option.method}, H={cost.inner_steps}: peers compute "
        f"{100 * cost.utilisation:.0f}% of the time, {cost.sent_bytes / 1e6:.3g} MB per window"
        f"{gap}."
    )
    others = "; ".join(_against(option, other) for other in _nearest(option, known))
    return picked, f"Expected loss at equal time: {others}."


def _nearest(option: RunOption, known: Sequence[RunOption]) -> list[RunOption]:
    """Return the next shorter and longer window, and the best of the other methods."""
    able = [other for other in known if other.runs and other.gap is not None]
    same = [other for other in able if other.method == option.method]
    same.sort(key=lambda other: other.prediction.inner_steps)
    place = same.index(option)
    rest = [other for other in able if other.method != option.method]
    return [*same[max(0, place - 1) : place], *same[place + 1 : place + 2], *map(_best, [rest])]


def _against(option: RunOption, other: RunOption) -> str:
    cost = other.prediction
    change = expected(other) / expected(option) - 1.0
    is_other = other.method != option.method
    name = f"{other.method} with H={cost.inner_steps}" if is_other else f"H={cost.inner_steps}"
    unsure = ", too little to be sure" if is_other and change < 0 else ""
    return (
        f"{name} {100 * abs(change):.1f}% {'higher' if change > 0 else 'lower'} "
        f"({100 * cost.utilisation:.0f}% computing){unsure}"
    )
