"""A momentum in bf16: its own digests, and the step that it takes."""

import hashlib
from dataclasses import replace

import pytest
import torch

from atoll.optim.log.replay import Replay
from atoll.optim.methods import MethodError, parse
from atoll.optim.state import halves
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import (
    Assembly,
    NotFinite,
    OuterState,
    SnapshotMismatch,
    snapshot_bytes,
)

LAYOUT = Layout(names=("blocks.0.w", "blocks.1.w"), shapes=((700, 200), (10_001,)))
N = LAYOUT.numel
EXPECTED = {
    "diloco": "a00d25ee341a5ccc5da7d905c8298db1e027059210ae400d080c74e3edc45d76",
    "streaming(count=2)": "cf1d6e6d982858cf37a8b5ea6129c49f8ce88b9b171d828f13aad5b0a56f42c8",
    "co2": "d04b00f5ebb760a42c26296589a95def2fbb0460e7f6f1b5836bd4dc92deeddd",
}


def values(seed: int, numel: int = N) -> torch.Tensor:
    """fp32 in [-1, 1) from integers alone."""
    x = torch.arange(numel, dtype=torch.int64) + seed * 0x9E3779B1
    for _ in range(3):
        x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
    return (x & 0xFFFFFF).to(torch.float32) * 2.0**-23 - 1.0


def states(spec: str, positions: int) -> list[OuterState]:
    replay = Replay(parse(spec), LAYOUT)
    run = [replay.method.genesis(LAYOUT, values(1_000))]
    for position in range(positions):
        fragment = replay.fragments[replay.fragment_at(position)]
        update_F = values(position, fragment.numel)
        run.append(replay.method.apply(run[-1], update_F, fragment=fragment, lr=0.5, momentum=0.9))
    return run


def bf16(spec: str) -> str:
    return replace(parse(spec), state="bf16").spec


@pytest.mark.parametrize("spec", EXPECTED)
def test_ten_positions_have_the_checked_in_digest(spec):
    digest = hashlib.sha256()
    for state in states(bf16(spec), 10):
        assert state.memory_M.dtype == torch.bfloat16
        digest.update(state.root())
    assert digest.hexdigest() == EXPECTED[spec]


def test_the_first_step_is_that_of_fp32_and_its_momentum_rounded():
    half, full = states("diloco(state=bf16)", 2), states("diloco", 2)
    assert torch.equal(half[1].params_N, full[1].params_N)  # moved before anything is rounded
    rounded = torch.empty(N, dtype=torch.bfloat16)
    halves.store_(rounded, full[1].momentum_N)
    assert torch.equal(half[1].momentum_N, rounded)
    assert not torch.equal(half[2].params_N, full[2].params_N)
    torch.testing.assert_close(half[2].params_N, full[2].params_N, rtol=0.0, atol=2.0**-8)


def test_parameters_stay_fp32_and_small_steps_are_not_lost():
    run = states("diloco(state=bf16)", 1)
    tiny = torch.full((N,), 1e-6)
    method = parse("diloco(state=bf16)")
    fragment = method.fragments(LAYOUT)[0]
    after = method.apply(run[0], tiny, fragment=fragment, lr=1.0, momentum=0.0)
    assert after.params_N.dtype == torch.float32
    assert float((after.params_N != run[0].params_N).float().mean()) > 0.9


def test_a_snapshot_holds_two_bytes_a_value_of_the_memory():
    state = states("diloco(state=bf16)", 3)[-1]
    assert state.snapshot_bytes == 6 * N == snapshot_bytes(LAYOUT, N, torch.bfloat16)
    fields = {"layout": LAYOUT, "position": 3, "root": state.root()}
    new = Assembly(
        leaf_digests=state.leaves(), memory_numel=N, memory_dtype=torch.bfloat16, **fields
    )
    for index in reversed(range(state.num_leaves)):
        new.add(index, state.read_leaf(index))
    got = new.finish()
    assert torch.equal(got.params_N, state.params_N)
    assert torch.equal(got.memory_M, state.memory_M)
    with pytest.raises(SnapshotMismatch):
        Assembly(leaf_digests=state.leaves(), memory_numel=2 * N, **fields)


def test_a_snapshot_with_infinity_in_its_memory_is_refused():
    state = states("diloco(state=bf16)", 1)[-1]
    state.memory_M[7] = float("inf")
    with pytest.raises(NotFinite, match="memory"):
        state.require_finite()


@pytest.mark.parametrize("spec", ["sparseloco", "demo", "dlion", "ddp", "noloco"])
def test_methods_without_an_outer_momentum_in_a_log_have_no_such_option(spec):
    with pytest.raises(MethodError, match="state"):
        parse(f"{spec}(state=bf16)")


@pytest.mark.parametrize("spec", ["diloco", "muloco", "streaming", "eager", "co2"])
def test_methods_with_one_name_it_in_their_specs(spec):
    method = parse(f"{spec}(state=bf16)")
    assert method.spec == f"{spec}(state=bf16)"
    assert method.memory_dtype == torch.bfloat16
    assert parse(spec).memory_dtype == torch.float32


def test_another_format_is_refused():
    with pytest.raises(MethodError, match="fp32, bf16"):
        parse("diloco(state=fp16)")
    with pytest.raises(MethodError, match="fp32 or bf16"):
        replace(parse("diloco"), state="fp16")
