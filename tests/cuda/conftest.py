"""Each test of a device runs on a GPU if there is one, and on the fake device of the CPU."""

import pytest

from atoll.peer.training.devices import Device
from support.accelerator import Accelerator, fake_device


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.cuda), "fake"])
def device(request):
    """Return a GPU, or the fake device, in whose mode the test runs."""
    if request.param == "cuda":
        yield Device.choose("cuda", "float32")
        return
    with Accelerator():
        yield fake_device()
