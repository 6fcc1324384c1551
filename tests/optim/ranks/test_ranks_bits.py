"""A peer of several ranks has the bits of one process, with any method that has a common state."""

import pytest

from atoll.optim import methods
from support.rank_orders import orders_beside_one_process
from support.rank_work import METHODS, MOST_METHODS, some_methods, train_and_save, with_methods
from support.ranks import on_ranks

pytestmark = pytest.mark.slow


def test_two_ranks_have_the_bits_of_one_process(tmp_path):
    on_ranks(2, with_methods, MOST_METHODS, folder=tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_number_of_ranks_has_them_with_every_method(world, spec, tmp_path):
    on_ranks(world, with_methods, [spec], folder=tmp_path)


def test_every_method_with_a_common_state_is_among_them():
    logged = {name for name in methods.names() if methods.parse(name).logged}
    assert {methods.parse(spec).name for spec in METHODS} == logged


@pytest.mark.parametrize("world", [3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_more_ranks_whose_ranges_are_uneven_do_too(world, tmp_path):
    on_ranks(world, some_methods, folder=tmp_path)


@pytest.mark.parametrize(
    "spec",
    [
        "diloco(codec=int4, count=2)",
        pytest.param("eager(codec=int8, peers=2)", marks=pytest.mark.exhaustive),
    ],
)
def test_other_numbers_of_ranks_resume_in_the_same_bits(spec, tmp_path):
    on_ranks(2, train_and_save, spec, range(5), tmp_path, folder=tmp_path)
    on_ranks(3, train_and_save, spec, range(5, 8), tmp_path, folder=tmp_path)


def test_ranks_follow_orders_at_one_position_in_the_same_bits(tmp_path):
    on_ranks(2, orders_beside_one_process, tmp_path, folder=tmp_path)
