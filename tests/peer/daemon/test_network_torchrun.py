"""A loop of one's own under torchrun, as a peer of a real run: FSDP2 and a network process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.limits import DEADLINE_S

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]  # 20 s of processor time

SCRIPT = Path(__file__).parents[3] / "scripts" / "example_fsdp2.py"
ROUNDS = 3


def torchrun(folder, *arguments):
    """Run the example in two processes; return what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(SCRIPT), *arguments]
    alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command,
        env=os.environ | alone,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [line.split() for line in done.stdout.splitlines() if line.startswith("round")]


@pytest.mark.timeout(DEADLINE_S + 60)
def test_the_example_under_torchrun_is_one_peer_of_a_run(organise, kit, tmp_path):
    spec = kit.tiny_spec(run={"rounds": ROUNDS}, outer={"inner_steps": 2}, data={"seq_len": 64})
    model = {"custom": "example_fsdp2:build", "overrides": {}}
    organiser = organise(type(spec).from_dict(spec.model_dump(mode="json") | {"model": model}))
    state = tmp_path / "loop.pt"
    lines = torchrun(
        tmp_path,
        *("--invite", organiser.invite.encode(), "--state-dir", str(tmp_path / "peer")),
        *("--state", str(state), "--scaler"),
    )
    assert [int(number) for _, number, *_ in lines] == [1, 2, 3]
    assert float(lines[-1][-1]) < float(lines[0][-1]) < 6
    kit.until(lambda: organiser.status().position == ROUNDS, "all rounds")
    (peer,) = organiser.status().peers
    assert peer.position == ROUNDS
    assert state.exists()
