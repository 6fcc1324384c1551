"""The gate to kernels of GPUs, where there is no GPU."""

import logging

import pytest
import torch

from atoll.compression.kernels import fused


def test_a_cpu_has_no_kernels():
    assert fused.kernels(torch.device("cpu")) is None


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'triton'"), OSError("gcc")])
def test_a_gpu_without_a_compiler_goes_on_without_kernels_and_says_so_once(
    error, monkeypatch, caplog
):
    def fail(name):
        raise error

    monkeypatch.setattr(fused.importlib, "import_module", fail)
    fused._kernels.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert fused.kernels(torch.device("cuda", 0)) is None
        assert fused.kernels(torch.device("cuda", 0)) is None
    fused._kernels.cache_clear()
    (said,) = caplog.messages
    assert str(error) in said
    assert "C compiler" in said
