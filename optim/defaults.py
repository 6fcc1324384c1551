"""Outer learning rate and momentum that follow the length of a run."""


def outer_defaults(rounds: int, inner_steps: int, peers: int) -> tuple[float, float]:
    """Outer learning rate and momentum for a run.

    Args:
        rounds: rounds of the run; 0 for one without an end.
        inner_steps: H.
        peers: peers that are expected.

    Returns:
        (lr, momentum) for `nesterov`.
    """
    if 0 < rounds < 100:
        return 0.8, 0.5
    return 0.7, 0.9
