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
from support.hunted_stages import StageWorld, plan_of

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
