"""hivemind is imported without what it changes for the whole process."""

import logging
import sys

import pytest
from torch import multiprocessing

from atoll.dht import bindings


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch shares by names alone")
def test_torch_shares_tensors_without_a_process_of_its_own():
    assert bindings.P2PD_PATH.exists()
    assert multiprocessing.get_sharing_strategy() == "file_descriptor"


def test_the_level_of_warnings_has_its_name():
    assert logging.getLevelName(logging.WARNING) == "WARNING"
