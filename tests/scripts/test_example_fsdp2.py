import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "example_fsdp2.py"

pytestmark = pytest.mark.slow


def example(ranks, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(SCRIPT)]
    done = subprocess.run(
        [*command, *arguments],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("round")]
    return [(int(number), float(loss)) for _, number, _, loss in lines]


def test_a_loop_with_a_scaler_resumes_on_other_numbers_of_ranks(tmp_path):
    state = ["--state", str(tmp_path / "state.pt")]
    first = example(2, "--rounds", "3", "--scaler", *state)
    assert [number for number, _ in first] == [1, 2, 3]
    then = example(3, "--rounds", "4", *state)
    assert [number for number, _ in then] == [4]
    assert then[0][1] < first[-1][1] < first[0][1] < 6
