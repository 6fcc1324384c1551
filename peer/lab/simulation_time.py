"""What frames cost in time: a worker that trains, and the link that carries its bytes.

Every inner step takes a given time, and each worker has one link that carries its bytes, in both
directions at once, one reduction after the other. A method that overlaps goes on training until
its reduction is due.

# T steps
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Network:
    """A worker's link and its speed of training."""

    mbit_s: float
    """Of its link, in each direction."""
    step_s: float
    """Seconds of an inner step."""
    latency_s: float = 0.05
    """Seconds that a reduction takes beyond its bytes."""


def wall_s(
    sent: Sequence[tuple[int, int]], steps: int, delay: int, network: Network
) -> list[float]:
    """Seconds after which each step's results are there.

    A worker computes, and its link carries one reduction after the other. At the step at which a
    reduction is due it waits for it.

    Args:
        sent: step and bytes of each reduction, in order.
        steps: T.
        delay: steps that a reduction may travel; 0 waits at once.
        network: link and speed.

    Returns:
        T times.
    """
    sizes = dict(sent)
    due: list[tuple[int, float]] = []
    now_s = free_s = 0.0
    times = []
    for step in range(1, steps + 1):
        now_s += network.step_s
        while due and due[0][0] <= step:
            now_s = max(now_s, due.pop(0)[1])
        if step in sizes:
            transfer_s = sizes[step] * 8 / (network.mbit_s * 1e6)
            free_s = max(now_s, free_s) + network.latency_s + transfer_s
            due.append((step + delay, free_s))
        if delay == 0 and due:
            now_s = due.pop()[1]
        times.append(now_s)
    return times


def utilisation(sent: Sequence[tuple[int, int]], steps: int, delay: int, network: Network) -> float:
    """Share of the time in which a worker computes; arguments as of `wall_s`."""
    return steps * network.step_s / wall_s(sent, steps, delay, network)[-1]


def ddp_bytes(params: int, workers: int, steps: int) -> int:
    """What a worker sends in bf16 data parallel: a ring's 2 (W - 1) / W of the gradient a step."""
    return 4 * params * (workers - 1) * steps // workers
