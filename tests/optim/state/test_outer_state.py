import struct

import pytest
import torch
from blake3 import blake3

from atoll.optim.state import outer_state
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import (
    LEAF_BYTES,
    Assembly,
    LeafRefused,
    NotFinite,
    OuterState,
    SnapshotIncomplete,
    SnapshotMismatch,
    StateError,
    leaf_digest,
    merkle_root,
)

LAYOUT = Layout(names=("w",), shapes=((300_000,),))  # 2.4 MB: three leaves, the last one short


@pytest.fixture
def state() -> OuterState:
    state = OuterState.genesis(LAYOUT, torch.arange(300_000, dtype=torch.float32))
    state.momentum_N.fill_(0.5)
    return state


def assembly(state: OuterState, **changes) -> Assembly:
    fields = {
        "layout": LAYOUT,
        "position": 9,
        "leaf_digests": state.leaves(),
        "root": state.root(),
    }
    return Assembly(**(fields | changes))


def test_snapshot_is_params_then_momentum_little_endian(state):
    snapshot = b"".join(state.read_leaf(i) for i in range(state.num_leaves))
    assert len(snapshot) == state.snapshot_bytes == 2_400_000
    assert struct.unpack("<3f", snapshot[:12]) == (0.0, 1.0, 2.0)
    assert struct.unpack("<f", snapshot[-4:]) == (0.5,)


def test_more_memory_than_a_momentum_travels_with_the_snapshot():
    memory_M = torch.arange(600_002, dtype=torch.float32)
    state = OuterState.genesis(LAYOUT, torch.ones(300_000), memory_M)
    assert state.snapshot_bytes == 4 * 900_002
    assert torch.equal(state.momentum_N, memory_M[:300_000])
    new = assembly(state, memory_numel=600_002)
    for index in range(state.num_leaves):
        new.add(index, state.read_leaf(index))
    assert torch.equal(new.finish().memory_M, memory_M)


def test_memory_of_another_length_is_refused(state):
    with pytest.raises(SnapshotMismatch, match="leaf digests"):
        assembly(state, memory_numel=900_000)


def test_a_leaf_has_the_digest_of_the_published_function():
    published = "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
    assert leaf_digest(b"abc").hex() == published


def test_leaves_are_digests_of_one_mebibyte_each(state):
    assert state.leaves() == [blake3(state.read_leaf(i)).digest() for i in range(state.num_leaves)]
    assert [len(state.read_leaf(i)) for i in range(3)] == [LEAF_BYTES, LEAF_BYTES, 302_848]


def test_a_state_that_shares_its_memory_has_the_snapshot_of_its_own_values(state):
    """Also of a leaf that begins among the parameters and ends in the memory."""
    new = state.next_with_memory()
    new.params_N.copy_(state.params_N * 2)
    assert new.memory_M.data_ptr() == state.memory_M.data_ptr()
    assert new.position == state.position + 1
    own = OuterState.genesis(LAYOUT, state.params_N * 2, state.memory_M)
    assert new.root() == own.root() != state.root()
    snapshot = b"".join(new.read_leaf(i) for i in range(new.num_leaves))
    assert snapshot == new.params_N.numpy().tobytes() + new.memory_M.numpy().tobytes()


def test_threads_that_share_leaves_give_the_root_of_one(state, monkeypatch):
    monkeypatch.setattr(outer_state, "LEAVES_A_RUN", 1)
    before, alone = torch.get_num_threads(), state.at(1)
    torch.set_num_threads(2)
    try:
        shared = state.at(1).leaves()
    finally:
        torch.set_num_threads(before)
    assert shared == alone.leaves()


def test_root_by_hand(state):
    a, b, c = state.leaves()
    ab = blake3(b"\x01" + a + b).digest()
    top = blake3(b"\x01" + ab + c).digest()
    root = blake3(b"atoll-state-root-2" + (3).to_bytes(8, "big") + top).digest()
    assert state.root() == root


def test_leaves_in_any_order_assemble_to_the_same_state(state):
    new = assembly(state)
    for index in (2, 0, 0, 1):
        new.add(index, state.read_leaf(index))
    assert not new.missing
    got = new.finish()
    assert got.position == 9
    assert got.root() == state.root()
    assert torch.equal(got.params_N, state.params_N)
    assert torch.equal(got.momentum_N, state.momentum_N)


def test_flipped_bit_in_a_leaf_is_refused(state):
    data = bytearray(state.read_leaf(1))
    data[77] ^= 4
    new = assembly(state)
    with pytest.raises(LeafRefused, match="digest"):
        new.add(1, data)
    assert new.missing == {0, 1, 2}


def test_leaf_under_another_index_is_refused(state):
    with pytest.raises(LeafRefused, match="digest"):
        assembly(state).add(0, state.read_leaf(1))


@pytest.mark.parametrize("index", [-1, 3, 1 << 60])
def test_index_outside_the_snapshot_is_refused(state, index):
    with pytest.raises(LeafRefused, match="expected a leaf"):
        assembly(state).add(index, b"")


@pytest.mark.parametrize("length", [0, LEAF_BYTES - 1, LEAF_BYTES + 1])
def test_leaf_of_another_length_is_refused(state, length):
    with pytest.raises(LeafRefused, match="leaf 0: "):
        assembly(state).add(0, bytes(length))


def test_a_leaf_of_wide_items_counts_its_bytes(state):
    wide = memoryview(bytearray(state.read_leaf(0))).cast("I")
    new = assembly(state)
    new.add(0, wide.cast("B"))
    assert new.missing == {1, 2}


def test_digests_of_another_root_are_refused(state):
    with pytest.raises(SnapshotMismatch, match="root"):
        assembly(state, root=bytes(32))
    with pytest.raises(SnapshotMismatch, match="root"):
        assembly(state, leaf_digests=state.leaves()[::-1])


def test_number_of_leaves_that_the_layout_denies_is_refused(state):
    more = [*state.leaves(), bytes(32)]
    with pytest.raises(SnapshotMismatch, match="expected 3"):
        assembly(state, leaf_digests=more, root=merkle_root(more))


def test_inner_node_does_not_pass_as_a_leaf(state):
    a, b, c = state.leaves()
    ab = blake3(b"\x01" + a + b).digest()
    assert merkle_root([ab, c]) != state.root()


@pytest.mark.parametrize("digests", [[], [b"short"], [bytes(32), bytes(33)]])
def test_digests_of_another_length_are_refused(digests):
    with pytest.raises(SnapshotMismatch):
        merkle_root(digests)


def test_unfinished_snapshot_names_what_is_missing(state):
    new = assembly(state)
    new.add(0, state.read_leaf(0))
    with pytest.raises(SnapshotIncomplete, match="2 are missing, the first is 1"):
        new.finish()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_certified_snapshot_with_nan_is_refused(state, value):
    state.momentum_N[-1] = value
    new = assembly(state)
    for index in range(3):
        new.add(index, state.read_leaf(index))
    with pytest.raises(NotFinite, match="memory"):
        new.finish()


def test_genesis_with_nan_is_refused():
    with pytest.raises(NotFinite, match="params"):
        OuterState.genesis(LAYOUT, torch.full((300_000,), float("nan")))


def test_genesis_of_another_length_is_refused():
    with pytest.raises(StateError):
        OuterState.genesis(LAYOUT, torch.zeros(3))


def test_an_entry_without_update_keeps_the_bits(state):
    later = state.at(12)
    assert later.position == 12
    assert later.root() == state.root()
