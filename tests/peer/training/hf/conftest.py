import pytest
import torch

from support.weights import write_folder


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path):
    """A folder of weights, named `base`."""
    write_folder(tmp_path / "base")
    return tmp_path / "base"
