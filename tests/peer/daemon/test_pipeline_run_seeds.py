"""A whole pipeline in virtual time: two stages with logs of their own, kills and cuts by seeds.

`StageWorld` holds all of the time that each log has one entry at a position and one state after it,
that a microbatch counts once at a peer, and that an origin's microbatches end by their deadline;
and after everything has healed, that each stage decides two more rounds, and that nothing is left
in work once nothing new begins.
"""

from collections import Counter

import pytest
import torch

from atoll.peer.lab.hunt.world import run
from support.hunted_stages import StageWorld, plan_of, plan_with_orders

ALWAYS = 1
"""Seeds of the default suite, some 2 s of CPU each."""


def run_seed(seed, folder):
    """What was broken in the run of a seed, with its story, and the faults that happened."""
    torch.set_num_threads(1)
    verdict = run(plan_of(seed), folder, StageWorld)
    broken = "" if verdict.broken is None else f"{verdict.broken}\n" + "\n".join(verdict.story)
    return broken, verdict.faults


@pytest.mark.parametrize("seed", range(ALWAYS))
def test_a_pipeline_keeps_its_rules_whatever_happens(seed, tmp_path):
    broken, faults = run_seed(seed, tmp_path / "run")
    assert broken == ""
    assert faults


def run_with_orders(seed, folder):
    """Return what was broken in the run of a seed with orders, and the places of orders by log."""
    torch.set_num_threads(1)
    control = {}

    class OrderedWorld(StageWorld):
        async def end(self):
            control.update({log: set() for log, _ in self.audit.control})
            for log, position in self.audit.control:
                control[log].add(position)
            await super().end()

    verdict = run(plan_with_orders(seed), folder, OrderedWorld)
    broken = "" if verdict.broken is None else f"{verdict.broken}\n" + "\n".join(verdict.story)
    return broken, control


def test_each_stage_pauses_and_resumes_at_a_position_of_its_own(tmp_path):
    broken, control = run_with_orders(0, tmp_path / "run")
    assert broken == ""
    assert len(control) == 2  # both stages' logs
    assert all(len(positions) >= 4 for positions in control.values())


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(100, 160, 20))
def test_more_pipelines_keep_their_rules_with_orders(first, tmp_path):
    seeds = range(first, first + 20)
    found = {seed: run_with_orders(seed, tmp_path / str(seed))[0] for seed in seeds}
    assert {seed: broken for seed, broken in found.items() if broken} == {}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(100, 300, 20))
def test_more_pipelines_keep_their_rules(first, tmp_path):
    found, faults = {}, Counter()
    for seed in range(first, first + 20):
        found[seed], happened = run_seed(seed, tmp_path / str(seed))
        faults += happened
    assert {seed: broken for seed, broken in found.items() if broken} == {}
    assert faults["kill"] and faults["cut"]
