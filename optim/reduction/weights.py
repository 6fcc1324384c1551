"""Weights, caps and clip factors of contributions, as pure functions.

The in-process group and the network round call the same ones, so a simulated run weighs as a
real one does. Medians are the lower of the two middle values when their number is even: with two
peers an absurd value then can't raise the bound that it is held to.

    WorkRefused (ValueError)   tokens, steps or a norm that no honest peer sends
"""

import math
from collections.abc import Sequence
from statistics import median_low
from typing import Literal

from atoll.optim.state.outer_step import to_fp32

WeightRule = Literal["rate", "tokens", "equal"]

MAX_TOKENS = 1 << 40  # a window of a day at 12 million tokens/s
MAX_STEPS = 1 << 24  # a window of a day at 194 steps/s
WEIGHT_CAP = 4.0  # times the median: one claim of absurd work can't own the average
STEPS_CAP = 4  # times the median: who claims more buys no longer norm; honest windows are shorter
CLIP_AT = 2.0  # times the median norm: honest norms stay within it, see docs/benchmarks
DRIFT_CAP = 3.0  # times the median norm: what was left out for longer would own an update


class WorkRefused(ValueError):  # noqa: N818
    """A contribution's claim of work or norm is not finite or absurd."""


def work_weight(tokens: int, steps: int, rule: WeightRule = "rate") -> float:
    """Weight of one contribution, before the cap.

    Args:
        tokens: tokens behind the pseudo-gradient; 0 for a contribution that must not count.
        steps: inner steps behind it.
        rule: "rate" is tokens / steps: a pseudo-gradient already grows with its steps, so plain
            tokens would count speed twice. "tokens" is the plain rule, "equal" gives everyone 1.

    Returns:
        A weight rounded to fp32, as entries carry it.

    Raises:
        WorkRefused: when a number is negative, zero steps did work, or one is absurd.
    """
    if not 0 <= tokens <= MAX_TOKENS or not 0 <= steps <= MAX_STEPS:
        raise WorkRefused(
            f"expected at most {MAX_TOKENS} tokens in at most {MAX_STEPS} steps, "
            f"got {tokens} in {steps}"
        )
    if tokens == 0:
        return 0.0
    if steps == 0:
        raise WorkRefused(f"expected steps behind {tokens} tokens, got 0")
    if rule == "equal":
        return 1.0
    return to_fp32(tokens / steps if rule == "rate" else tokens)


def cap_weights(weights: Sequence[float]) -> list[float]:
    """Cap weights at 4 times their median; weights of 0 stay 0 and do not count in the median.

    Raises:
        WorkRefused: when a weight is negative or not finite.
    """
    _require_amounts(weights, "weight")
    positive = [weight for weight in weights if weight > 0]
    if not positive:
        return [0.0 for _ in weights]
    cap = to_fp32(WEIGHT_CAP * median_low(positive))
    return [min(weight, cap) for weight in weights]


def clip_factors(
    norms: Sequence[float], steps: Sequence[int], *, at: float = CLIP_AT
) -> list[float]:
    """Factors that bring each contribution's norm a step to at most `at` times the median.

    Args:
        norms: Euclidean norms of the contributions; 0 for one of weight 0.
        steps: inner steps behind each; a norm is divided by them, as it grows with them, but by at
            most 4 times the median of those with a norm.
        at: the bound, in medians.

    Returns:
        Factors in (0, 1], fp32; 1 for most. A contribution of norm 0 gets 1 and does not count
        in the median.

    Raises:
        WorkRefused: when a norm is negative or not finite, or a norm above 0 took no steps.
    """
    _require_amounts(norms, "norm")
    if any(norm > 0 and count < 1 for norm, count in zip(norms, steps, strict=True)):
        raise WorkRefused("expected steps behind every norm above 0, got 0")
    counts = [count for norm, count in zip(norms, steps, strict=True) if norm > 0]
    most = STEPS_CAP * median_low(counts or [1])
    rates = [norm / min(max(count, 1), most) for norm, count in zip(norms, steps, strict=True)]
    positive = [rate for rate in rates if rate > 0]
    if not positive:
        return [1.0 for _ in rates]
    bound = at * median_low(positive)
    return [1.0 if rate <= bound else to_fp32(bound / rate) for rate in rates]


def drift_ratio(norm: float, others: Sequence[float]) -> float:
    """Return a left-out contribution's norm as a multiple of the others' median; 0 if unknown.

    A norm a step says nothing here: what was left out grows by windows, and their steps with it.

    Args:
        norm: of the contribution.
        others: norms of the contributions that counted; zeros are none.

    Raises:
        WorkRefused: when a norm is negative or not finite.
    """
    _require_amounts([norm, *others], "norm")
    positive = [other for other in others if other > 0]
    return norm / median_low(positive) if positive else 0.0


def _require_amounts(values: Sequence[float], what: str) -> None:
    for value in values:
        if not math.isfinite(value) or value < 0:
            raise WorkRefused(f"expected each {what} to be finite and not negative, got {value}")
