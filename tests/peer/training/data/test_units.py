"""Rows of the units that a peer holds: each once, whatever becomes of contributions."""

import numpy as np
import pytest
import torch

from atoll.coordinator.run.spec import RunSpec, SpecError
from atoll.optim.reducer import Commit
from atoll.peer.errors import DataError
from atoll.peer.training.data.corpus import LocalCorpus
from atoll.peer.training.data.tokens import ByteTokenizer
from atoll.peer.training.data.units import HeldUnits, UnitStream, count_units, permuted

ROWS = 103
ORDER = [833, 675, 867, 703, 38, 290]
DATA = {"source": "text", "seq_len": 8, "same_text": True, "once": True}


def run(**data: object) -> RunSpec:
    return RunSpec.from_dict(
        {"data": DATA | data, "inner": {"batch_size": 2, "grad_accumulation": 3}}
    )


def corpus(rows: int = ROWS) -> LocalCorpus:
    tokens = np.arange(rows * 8 + 5, dtype=np.uint16)
    return LocalCorpus(train_N=tokens, valid_N=tokens, tokenizer=ByteTokenizer())


def decided(*units: int, counts: bool = True, settles: bool = True, reset: bool = False) -> Commit:
    return Commit(
        position=1,
        params_N=torch.zeros(1),
        included=torch.ones(1, dtype=torch.bool) if counts else None,
        settles=settles,
        members=1,
        reset=reset,
        units=units,
    )


def holding(*units: int) -> HeldUnits:
    """Units after the first contribution, which is empty."""
    held = HeldUnits()
    held.hand_in(0)
    held.settle(decided(*units))
    return held


@pytest.mark.parametrize("count", [1, 2, 3, 64, 65, 1000])
def test_a_pass_visits_each_row_once_and_passes_differ(count: int) -> None:
    places = np.arange(count, dtype=np.uint64)
    first, second = (permuted(places, count=count, seed=1, number=n) for n in (1, 2))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(count))
    assert count < 64 or first.tolist() != second.tolist() != list(range(count))


def test_the_order_of_rows_stays_as_it_is() -> None:
    places = np.arange(6, dtype=np.uint64)
    assert permuted(places, count=1000, seed=7, number=1).tolist() == ORDER


def test_units_hold_all_rows_once_but_for_the_rest() -> None:
    spec = run(units=17)
    stream = UnitStream(spec, corpus())
    stream.held.hand_in(0)
    stream.held.settle(decided(1, 0, 17))
    batches = [batch for _ in range(17) for batch in stream.next_batches()]
    assert {tuple(batch.shape) for batch in batches} == {(2, 9)}
    first = torch.cat(batches)[:, 0].tolist()
    assert len(set(first)) == len(first) == 17 * 6
    assert all(start % 8 == 0 for start in first)
    assert stream.held.is_empty


def test_a_contribution_that_counts_has_done_its_units() -> None:
    held = holding(1, 0, 4)
    assert [held.take(), held.take()] == [0, 1]
    assert held.hand_in(tokens=10) == 2
    assert held.take() == 2  # while it is under way
    held.settle(decided(1, 2, 6))
    assert [held.take(), held.hand_in(tokens=10)] == [3, 2]


def test_what_is_left_out_stays_in_the_next_contribution() -> None:
    held = holding(1, 4, 6, 0, 2)
    assert [held.take(), held.take(), held.hand_in(tokens=10)] == [4, 5, 2]
    held.settle(decided(1, 4, 6, 0, 2, counts=False))
    assert [held.take(), held.hand_in(tokens=15)] == [0, 3]


def test_what_is_dropped_is_trained_again() -> None:
    held = holding(1, 0, 4)
    held.take()
    held.settle(decided(reset=True))
    held.settle(decided(1, 0, 4, counts=False, settles=False))
    assert held.is_empty
    held.hand_in(tokens=0)
    held.settle(decided(1, 0, 4, counts=False, settles=False))
    assert held.take() == 0
    assert held.hand_in(tokens=0) == 0  # its window ended in NaN
    held.settle(decided(1, 0, 4))
    assert held.take() == 0


def test_units_are_resumed_where_they_were_saved() -> None:
    held, again = holding(3, 0, 2, 7, 9), HeldUnits()
    held.take()
    held.hand_in(tokens=5)
    again.load_state_dict(held.state_dict())
    assert again.state_dict() == held.state_dict()
    assert [again.take(), again.take(), again.number] == [1, 7, 3]
    with pytest.raises(DataError, match="'units' stream"):
        again.load_state_dict({"kind": "windows", "batches": 1})


def test_a_text_of_another_length_is_refused() -> None:
    assert count_units(run(), corpus()) == 17
    with pytest.raises(DataError, match="expected a text of 12 units"):
        UnitStream(run(units=12), corpus())
    with pytest.raises(DataError, match="at least 6 rows"):
        count_units(run(), corpus(5))


@pytest.mark.parametrize(
    ("section", "change", "remedy"),
    [
        ("data", {"source": "hf:a/b", "same_text": False}, "atoll shards"),
        ("data", {"same_text": False}, "set data.same_text to true"),
        ("topology", {"stages": 2}, "set topology.stages to 1"),
        ("outer", {"method": "streaming"}, "choose 'diloco'"),
        ("outer", {"method": "ddp", "inner_steps": 1}, "choose 'diloco'"),
        ("outer", {"method": "noloco"}, "choose 'diloco'"),
        ("round", {"electors": "keepers"}, "set round.electors to 'members'"),
    ],
)
def test_a_run_that_cannot_hand_out_rows_is_refused(
    section: str, change: dict[str, object], remedy: str
) -> None:
    fields: dict[str, dict[str, object]] = {"data": dict(DATA)}
    fields[section] = fields.get(section, {}) | change
    with pytest.raises(SpecError, match=r"data\.once") as refused:
        RunSpec.from_dict(fields)
    assert remedy in str(refused.value)
