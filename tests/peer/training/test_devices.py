import re

import pytest
import torch

from atoll.peer.errors import DeviceError
from atoll.peer.training.devices import Device


@pytest.fixture
def no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)


def test_auto_is_the_cpu_where_there_is_nothing_else(no_accelerator):
    assert Device.choose() == Device(device=torch.device("cpu"), precision="float32")
    assert Device.choose().label == "cpu"


def test_auto_is_cuda_in_bfloat16_where_there_is_one(one_gpu):
    assert Device.choose() == Device(device=torch.device("cuda"), precision="bfloat16")
    assert Device.choose(precision="float32").precision == "float32"


def test_auto_prefers_mps_to_the_cpu(no_accelerator, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert Device.choose() == Device(device=torch.device("mps"), precision="float32")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda", "asked for cuda, but torch"),
        ("cuda:3", "sees no CUDA device; use --device auto"),
        ("mps", "asked for mps, but this machine has none"),
        ("tpu", "unknown device 'tpu'; expected auto, cuda, mps or cpu"),
        ("meta", "unknown device 'meta'"),
    ],
)
def test_a_device_that_is_not_there_is_refused(no_accelerator, name, message):
    with pytest.raises(DeviceError, match=re.escape(message)):
        Device.choose(name)


def test_a_second_gpu_that_is_not_there_is_refused(one_gpu):
    with pytest.raises(DeviceError, match="asked for cuda:1, but there are 1 CUDA devices"):
        Device.choose("cuda:1")


def test_an_old_gpu_falls_back_or_says_so(one_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert Device.choose().precision == "float32"
    with pytest.raises(DeviceError, match="cuda has no bfloat16; set precision to float32"):
        Device.choose(precision="bfloat16")


def test_an_unknown_precision_is_refused():
    with pytest.raises(DeviceError, match="unknown precision 'float16'; expected one of auto"):
        Device.choose("cpu", "float16")


def test_autocast_lowers_products_only():
    a = torch.ones(2, 2)
    with Device.choose("cpu", "bfloat16").autocast():
        assert (a @ a).dtype == torch.bfloat16
    with Device.choose("cpu").autocast():
        assert (a @ a).dtype == torch.float32
