import errno
import json
import math
import resource
import struct
import tracemalloc

import pytest
import safetensors
import torch

from atoll.peer.errors import SavedStateError
from atoll.peer.training import saved
from support.accelerator import DEVICE, Accelerator

TREE = {
    "numbers": [1, 2.5, -0.1, True, None, "text", math.inf],
    "moments": {0: {"step": torch.tensor(3.0)}, 1: {"exp_avg": torch.randn(2, 3)}},
    "betas": (0.9, (1, 2)),
    "bytes": b"\0\xff",
    "empty": {"list": [], "map": {}, "tensor": torch.zeros(0)},
    "kinds": [torch.tensor([True, False]), torch.ones(3, dtype=torch.bfloat16), torch.arange(4)],
}


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@pytest.fixture
def path(tmp_path):
    saved.save(tmp_path / "state", TREE, kind="trainer", run="r1")
    return tmp_path / "state"


def load(path, kind="trainer", run="r1"):
    return saved.load(path, kind=kind, run=run)


def test_a_tree_comes_back_as_it_was(path):
    assert equal(load(path), TREE)


def test_views_of_one_tensor_are_saved_apart(tmp_path):
    base = torch.arange(6.0)
    saved.save(tmp_path / "s", {"a": base[:3], "b": base.view(2, 3).T}, kind="k", run="r")
    found = saved.load(tmp_path / "s", kind="k", run="r")
    assert torch.equal(found["a"], base[:3]) and torch.equal(found["b"], base.view(2, 3).T)


@pytest.mark.parametrize("wrong", [{"kind": "reducer"}, {"run": "r2"}])
def test_another_kind_or_run_is_refused(path, wrong):
    with pytest.raises(SavedStateError, match=r"is of another (kind|run): expected"):
        load(path, **wrong)


@pytest.fixture
def little_room():
    """Limit files to 4 kB, like a full disk except for the error number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("little_room")
def test_a_full_disk_is_an_os_error_and_leaves_the_old_file(path):
    """The error carries the system's number instead of a safetensors text, so a remedy is known."""
    with pytest.raises(OSError, match="File too large") as raised:
        saved.save(path, {"other": torch.zeros(10_000)}, kind="trainer", run="r1")
    assert raised.value.errno == errno.EFBIG and raised.value.filename == str(path)
    assert equal(load(path), TREE)
    assert [file.name for file in path.parent.iterdir() if file.is_file()] == ["state"]


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(SavedStateError, match="does not exist"):
        load(tmp_path / "absent")


def test_every_flipped_byte_of_the_tensors_is_noticed(path):
    whole = path.read_bytes()
    (header,) = struct.unpack("<Q", whole[:8])
    for place in range(8 + header, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(SavedStateError, match="damaged"):
            load(path)


def test_flipped_bytes_of_the_header_are_noticed_or_harmless(path):
    whole = path.read_bytes()
    (header,) = struct.unpack("<Q", whole[:8])
    for place in range(0, 8 + header, 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert equal(load(path), TREE)
        except SavedStateError:
            pass


@pytest.mark.parametrize("length", [0, 5, 8, 100, -1])
def test_a_cut_file_is_refused(path, length):
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(SavedStateError, match="damaged"):
        load(path)


def test_a_header_that_claims_terabytes_is_refused(path):
    path.write_bytes(struct.pack("<Q", 1 << 42) + b"{}")
    with pytest.raises(SavedStateError, match="damaged"):
        load(path)


def test_a_plain_safetensors_file_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2)}, tmp_path / "w")
    with pytest.raises(SavedStateError, match="is not a saved state of this version"):
        load(tmp_path / "w")


def test_a_failed_save_leaves_the_old_file(path):
    with pytest.raises(TypeError, match="cannot save a object"):
        saved.save(path, {"thing": object()}, kind="trainer", run="r1")
    with pytest.raises(TypeError, match="expected int or str as the key"):
        saved.save(path, {1.5: 2}, kind="trainer", run="r1")
    assert equal(load(path), TREE)
    assert [p.name for p in path.parent.iterdir()] == ["state"]


def test_the_file_is_a_safetensors_file_with_aligned_tensors(path):
    with safetensors.safe_open(path, framework="pt") as file:
        kinds = {name: file.get_tensor(name).dtype for name in file.keys()}
    assert sorted(map(str, kinds.values())) == sorted(
        ["torch.float32"] * 3 + ["torch.bool", "torch.bfloat16", "torch.int64"]
    )
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    header = json.loads(path.read_bytes()[8 : 8 + length])
    del header["__metadata__"]
    assert length % 8 == 0
    for entry in header.values():
        width = {"F32": 4, "I64": 8, "BF16": 2, "BOOL": 1}[entry["dtype"]]
        assert entry["data_offsets"][0] % width == 0


def test_a_save_makes_no_second_copy_of_what_it_writes(tmp_path):
    tree = {str(i): torch.ones(500_000) for i in range(8)}  # 16 MB
    tracemalloc.start()
    try:
        saved.save(tmp_path / "state", tree, kind="k", run="r")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
    assert equal(saved.load(tmp_path / "state", kind="k", run="r"), tree)


def test_a_save_that_has_begun_is_of_its_moment(tmp_path):
    path, changes = tmp_path / "state", torch.ones(3)
    begun = saved.begin(path, {"changes": changes}, kind="k", run="r")
    changes.zero_()
    assert not path.exists()
    saved.finish(begun)
    found = saved.load(path, kind="k", run="r")
    assert torch.equal(found["changes"], torch.ones(3))
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


def test_a_tree_that_holds_the_mark_of_the_digest_is_saved(tmp_path):
    tree = {"text": '"sha256":"' + "0" * 64, "tensor": torch.ones(2)}
    saved.save(tmp_path / "state", tree, kind="k", run="r")
    assert equal(saved.load(tmp_path / "state", kind="k", run="r"), tree)


def test_a_tensor_of_a_kind_that_no_file_holds_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"cannot save a tensor of torch\.complex64"):
        saved.save(tmp_path / "s", {"a": torch.zeros(1, dtype=torch.complex64)}, kind="k", run="r")


def test_what_lies_on_a_device_is_saved_from_there(tmp_path):
    with Accelerator() as accelerator:
        tree = {"a": torch.arange(6.0).view(2, 3).to(DEVICE)}
        saved.save(tmp_path / "s", tree, kind="k", run="r")
        assert accelerator.copies == [6]
    found = saved.load(tmp_path / "s", kind="k", run="r")
    assert torch.equal(found["a"], torch.arange(6.0).view(2, 3))
