import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from reducer_bench import Bench


@pytest.fixture
def bench(tmp_path):
    """Makes reducers, and ends them."""
    made = []

    def make(**changes):
        made.append(Bench(tmp_path / f"log-{len(made)}", **changes))
        return made[-1]

    yield make
    for each in made:
        each.close()
