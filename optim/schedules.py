"""How long a window is: H as a pure function of what a peer knows.

fixed       the same H always
qsr         H grows with 1 / lr^2 (Quadratic Synchronization Rule, arXiv:2310.14423)
deadline    each peer's own H, so that unequal peers arrive together; runs with
            outer.windows = "deadline" take it, with the step times that peers tell each other
"""

import math
from collections.abc import Sequence
from statistics import median_low

SLOWEST, FASTEST = 0.5, 2.0  # H within half to twice the median; beyond it change accumulation


def fixed(inner_steps: int) -> int:
    """H.

    Raises:
        ValueError: when it is below 1.
    """
    if inner_steps < 1:
        raise ValueError(f"expected at least one inner step, got {inner_steps}")
    return inner_steps


def qsr(lr: float, *, shortest: int, growth: float) -> int:
    """H of the window that begins at inner rate `lr`: max(shortest, floor((growth / lr)^2)).

    Args:
        lr: inner learning rate; 0 gives no sensible window.
        shortest: H while the rate is high.
        growth: the paper's alpha; the rate at which H would be 1.

    Raises:
        ValueError: when a number is not above 0.
    """
    if lr <= 0 or growth <= 0:
        raise ValueError(f"expected a rate and a growth above 0, got {lr} and {growth}")
    return max(fixed(shortest), math.floor((growth / lr) ** 2))


def deadline(step_s: Sequence[float], *, inner_steps: int) -> list[int]:
    """H of each of several unequal peers, so that all end their windows together.

    The window lasts as long as `inner_steps` take at the median speed. Nobody's H leaves half to
    twice that of the median peer: a slower peer ends later, a faster one waits, and both should
    change how many batches they accumulate a step.

    Args:
        step_s: seconds of an inner step, a peer each.
        inner_steps: H at the median speed.

    Raises:
        ValueError: when there is no peer, or a time is not above 0.
    """
    if not step_s or any(not 0 < seconds < math.inf for seconds in step_s):
        raise ValueError(f"expected finite step times above 0, got {list(step_s)}")
    window_s = fixed(inner_steps) * median_low(step_s)
    shortest = max(1, math.ceil(SLOWEST * inner_steps))
    longest = math.floor(FASTEST * inner_steps)
    return [min(max(math.floor(window_s / s + 1e-9), shortest), longest) for s in step_s]
