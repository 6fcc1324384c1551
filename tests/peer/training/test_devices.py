import contextlib
import re
from types import SimpleNamespace

import pytest
import torch

from atoll.peer.errors import DeviceError
from atoll.peer.training.devices import PRECISIONS, Device, gpu_memory, is_out_of_memory
from atoll.peer.training.machine import memory_total


@pytest.fixture
def no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)


def test_auto_is_the_cpu_where_there_is_nothing_else(no_accelerator):
    assert Device.choose() == Device(device=torch.device("cpu"), precision="float32")
    assert Device.choose().label == "cpu"


def test_auto_is_cuda_in_bfloat16_where_there_is_one(one_gpu):
    assert Device.choose() == Device(device=torch.device("cuda"), precision="bfloat16")
    assert Device.choose(precision="float32").precision == "float32"


def test_a_gpus_memory_is_its_own(one_gpu, monkeypatch):
    gpu = SimpleNamespace(total_memory=8 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert Device.choose().memory_bytes == 8 << 30
    assert Device(device=torch.device("cpu"), precision="float32").memory_bytes == memory_total()


def test_ranks_have_the_memory_of_as_many_gpus(one_gpu, monkeypatch):
    gpu = SimpleNamespace(total_memory=8 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert [gpu_memory("auto"), gpu_memory("cuda:0", ranks=4)] == [8 << 30, 32 << 30]
    assert [gpu_memory("cpu"), gpu_memory("cuda:7"), gpu_memory("tpu")] == [None] * 3


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


@pytest.mark.parametrize(
    ("capability", "precision"), [((7, 5), "float16"), ((7, 0), "float16"), ((6, 1), "float32")]
)
def test_an_old_gpu_takes_what_it_computes_in(one_gpu, monkeypatch, capability, precision):
    def is_supported(including_emulation):
        return including_emulation  # every card emulates

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert Device.choose().precision == precision
    with pytest.raises(DeviceError, match="cuda does not compute in bfloat16; set precision to au"):
        Device.choose(precision="bfloat16")


def test_a_second_gpu_is_asked_itself_and_becomes_the_current_one(one_gpu, monkeypatch):
    current = [torch.device("cuda:0")]

    @contextlib.contextmanager
    def on(device):
        before, current[0] = current[0], device
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: current[0].index == 1
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.__setitem__(0, device))
    assert Device.choose("cuda:0").precision == "float16"
    second = Device.choose("cuda:1")
    assert second.precision == "bfloat16"
    assert current == [torch.device("cuda:0")]
    second.activate()
    assert current == [torch.device("cuda:1")]


def test_an_unknown_precision_is_refused():
    with pytest.raises(DeviceError, match="unknown precision 'float8'; expected one of auto"):
        Device.choose("cpu", "float8")


def test_only_float16_needs_a_scaled_loss():
    scalers = {name: Device.choose("cpu", name).scaler() for name in PRECISIONS}
    assert [name for name, scaler in scalers.items() if scaler is not None] == ["float16"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8.77 GB)"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_a_device_without_memory_is_told_from_other_errors(error, expected):
    assert is_out_of_memory(error) is expected


def test_this_machine_says_it_in_these_words():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_autocast_lowers_products_only():
    a = torch.ones(2, 2)
    with Device.choose("cpu", "bfloat16").autocast():
        assert (a @ a).dtype == torch.bfloat16
    with Device.choose("cpu").autocast():
        assert (a @ a).dtype == torch.float32


def test_contributions_are_encoded_on_cuda_alone():
    devices = [Device(device=torch.device(name), precision="float32") for name in ("cuda:1", "mps")]
    assert [each.encodes_on for each in devices] == [torch.device("cuda:1"), torch.device("cpu")]
