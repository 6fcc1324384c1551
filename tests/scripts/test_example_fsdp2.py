import contextlib
import io
import os
import socket
import sys
from functools import partial
from unittest.mock import patch

import example_fsdp2
import pytest
import torch

from support.ranks import at_once

pytestmark = pytest.mark.slow


def example(rank, world, port, arguments, output):
    """Run the script in a process with the environment that torchrun gives it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    without_kernels = partial(torch.compile, backend="aot_eager")  # those need a C++ compiler
    with (
        patch.object(torch, "compile", without_kernels),
        patch.object(sys, "argv", ["example_fsdp2.py", *arguments]),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        example_fsdp2.main()
    if rank == 0:
        output.write_text(printed.getvalue())


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def losses(world, folder, *arguments):
    """Run the script on so many ranks; return the loss that it printed of each round."""
    output, port = folder / "printed", free_port()
    arguments = (*arguments, "--state", str(folder / "state.pt"))
    at_once([(example, (rank, world, port, arguments, output)) for rank in range(world)])
    lines = [line.split() for line in output.read_text().splitlines() if line.startswith("round")]
    return {int(number): float(loss) for _, number, _, loss in lines}


@pytest.mark.exhaustive  # compiling takes longer than training
def test_a_compiled_loop_has_the_losses_of_a_plain_one(tmp_path):
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    plain.mkdir()
    compiled.mkdir()
    expected = losses(2, plain, "--rounds", "2")
    assert losses(2, compiled, "--rounds", "2", "--compile") == pytest.approx(expected, abs=0.01)


def test_a_loop_with_a_scaler_resumes_on_other_numbers_of_ranks(tmp_path):
    first = losses(2, tmp_path, "--rounds", "3", "--scaler")
    assert list(first) == [1, 2, 3]
    then = losses(3, tmp_path, "--rounds", "4")
    assert list(then) == [4]
    assert then[4] < first[3] < first[1] < 6
