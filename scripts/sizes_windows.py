"""Windows of `bench sizes` that are as long as people's, which take minutes.

In shorter ones a peer keeps more memory than it needs, because getting it again would take too much
of its time (`atoll.optim.state.vectors`).
"""

import math

import torch

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state.layout import Layout
from atoll.optim.state.vectors import LEAST_WINDOW_NS_PER_VALUE, LEAST_WINDOW_S
from atoll.peer.lab import step_time
from atoll.peer.lab.plan import bare_model

MARGIN = 1.5  # over the shortest window that counts as long: seconds of a step vary
LEAST_STEPS = 2


def step_ns(spec: RunSpec) -> float:
    """Return the nanoseconds that an inner step takes a parameter, on one thread as in the runs.

    Beside others a step takes longer, which makes windows longer.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        step_s = step_time.measured(spec, "cpu").adamw_s
    finally:
        torch.set_num_threads(threads)
    return 1e9 * step_s / Layout.of(bare_model(spec)).numel


def long_steps(params: int, ns: float) -> int:
    """Return the inner steps of a long window.

    Args:
        params: of the model.
        ns: nanoseconds that a step takes a parameter.
    """
    window_s = max(LEAST_WINDOW_S, 1e-9 * LEAST_WINDOW_NS_PER_VALUE * params)
    return max(LEAST_STEPS, math.ceil(MARGIN * window_s / (1e-9 * ns * params)))
