"""One admitted peer of a swarm says anything, at any moment, to anybody. Each seed is another liar.

The liar is in `support.liars`. `./scripts/bench attacks --seeds 2000` runs more of them.
"""

import pytest

from support.liar_runs import run_liar

SEEDS = 1  # of each mode; the benchmark runs thousands


@pytest.mark.parametrize("trust", ["crash", "byzantine"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_one_liar_neither_forks_nor_stops_a_run(tmp_path, trust, seed):
    told = run_liar(tmp_path, seed, trust)
    assert told.lies > 10
    assert told.faults == []
