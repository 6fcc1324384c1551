"""Two peers a stage with each method that has a log: they learn, and a stage has one state."""

import itertools

import pytest
import torch

from atoll.optim.methods import names, parse
from support.small_stages import batches, spec_of
from support.staged_peers import trained

INNER_STEPS, STEPS = 3, 12
METHODS = {
    "diloco": INNER_STEPS,
    "muloco": INNER_STEPS,
    "sparseloco": INNER_STEPS,
    "streaming(count=2, tau=1)": INNER_STEPS,
    "eager": INNER_STEPS,
    "co2": INNER_STEPS,
    "ddp": 1,
    "demo": 1,
    "dlion": 1,
}
"""and their windows"""


def repeated(spec, seed):
    """One microbatch for ever, the same for all: there is something to learn within some steps."""
    return itertools.repeat(next(batches(spec)))


@pytest.mark.parametrize("name", METHODS)
def test_stages_train_by_every_method_that_suits(name):
    spec = spec_of(2, accumulation=2, deadline_s=50.0)
    method = parse(name)
    stages, hops = trained(spec, 2, method, STEPS, inner_steps=METHODS[name], draw=repeated)
    for one, other in stages:
        assert one.worker.statistics().position == other.worker.statistics().position > 0
        assert torch.equal(one.worker.synced_N, other.worker.synced_N)
    for losses in (peer.losses for stage in stages for peer in stage):
        assert losses[-1] < losses[0] - 0.05
    assert [hop.statistics().omitted for hop in hops] == [{}] * len(hops)


def test_no_method_with_a_log_is_missing_here():
    logged = {name for name in names() if parse(name).logged}
    assert {parse(name).name for name in METHODS} == logged
