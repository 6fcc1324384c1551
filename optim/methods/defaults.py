"""Outer learning rate and momentum that follow the length of a run.

Momentum remembers about 1 / (1 - momentum) rounds and multiplies the steady step by as much. A
run of a dozen rounds changes direction faster than that, and pays for it; one of thousands gains.

Measured here, nano, 4 peers (docs/benchmarks/outer.md), nats a byte: 12 rounds of H=10 end at 2.084
with 0.8/0.3, 2.095 with 1.0/0, 2.110 with 0.8/0.5, 2.456 with 1.0/0.6; 12 rounds of H=30 at 1.666
with 0.8/0.5, 1.691 with 1.0/0 and 1.756 with 1.0/0.6.
Published for thousands of rounds, from 335M parameters on (arXiv:2503.09799): momentum 0.9 and, by
peers, 0.4 (1), 0.6 (2 and 4), 0.8 (8). Between the two we interpolate over the logarithm of the
number of rounds.
"""

import math

SHORT = (0.8, 0.3)  # learning rate and momentum up to SHORT_ROUNDS
SHORT_ROUNDS = 100
LONG_MOMENTUM = 0.9
LONG_ROUNDS = 1_000  # the published runs are longer
LONG_LR = ((1, 0.4), (4, 0.6), (8, 0.8))  # up to as many peers; 0.8 beyond


def outer_defaults(rounds: int, inner_steps: int, peers: int) -> tuple[float, float]:
    """Outer learning rate and momentum for a run.

    Args:
        rounds: rounds of the run; 0 for one without an end, which counts as long.
        inner_steps: H. Windows of one step leave nothing to amplify: they take the plain average,
            which with one peer is the inner optimizer itself.
        peers: peers that are expected.

    Returns:
        (lr, momentum) for `nesterov`, rounded to two digits.

    Raises:
        ValueError: when rounds is negative, or one of the others is below 1.
    """
    if rounds < 0 or inner_steps < 1 or peers < 1:
        raise ValueError(
            f"expected rounds of at least 0, inner steps and peers of at least 1, "
            f"got {rounds}, {inner_steps} and {peers}"
        )
    if inner_steps == 1:
        return 1.0, 0.0
    share = _length(rounds)
    lr, momentum = SHORT
    long_lr = next((lr for limit, lr in LONG_LR if peers <= limit), LONG_LR[-1][1])
    return (
        round(lr + share * (long_lr - lr), 2),
        round(momentum + share * (LONG_MOMENTUM - momentum), 2),
    )


def _length(rounds: int) -> float:
    """0 for a short run, 1 for a long one, the logarithm between."""
    if rounds == 0:
        return 1.0
    share = math.log(rounds / SHORT_ROUNDS) / math.log(LONG_ROUNDS / SHORT_ROUNDS)
    return min(max(share, 0.0), 1.0)
