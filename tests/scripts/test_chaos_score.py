"""How a run under chaos is judged."""

import pytest
from chaos_score import Life, Memory, living_s, tokens_between


def life(trains_s: float, ended_s: float, *frozen: tuple[float, float]) -> Life:
    return Life(host=1, trains_s=trains_s, ended_s=ended_s, frozen=frozen)


@pytest.mark.parametrize(
    ("lives", "seconds"),
    [
        ([life(0.0, 200.0)], 90.0),
        ([life(20.0, 50.0), life(60.0, 200.0)], 70.0),
        ([life(20.0, 200.0, (90.0, 130.0))], 70.0),
        ([life(20.0, 50.0, (60.0, 70.0))], 30.0),
        ([life(20.0, 50.0, (40.0, 70.0))], 20.0),
        ([life(0.0, 5.0)], 0.0),
    ],
    ids=["all the time", "killed", "frozen at the end", "frozen later", "killed frozen", "before"],
)
def test_peers_live_while_they_can_train(lives: list[Life], seconds: float) -> None:
    assert living_s(lives, (10.0, 100.0)) == seconds


def test_tokens_between_rounds_count_in_part() -> None:
    points = [(0.0, 0), (10.0, 100), (20.0, 300)]
    assert tokens_between(points, (5.0, 15.0)) == 150.0
    assert tokens_between(points, (0.0, 20.0)) == 300.0
    assert tokens_between(points, (-5.0, 30.0)) == 300.0


def grown(sizes: list[int]) -> float | None:
    return Memory(name="x", samples=tuple((5.0 * n, size) for n, size in enumerate(sizes))).growth


def test_memory_that_is_given_back_is_no_growth() -> None:
    loading = [10] * 60
    assert grown(loading + [100] * 40) == 0.0
    assert grown(loading + [100, 100, 900, 100] * 10) == 0.0
    assert grown(loading + list(range(100, 140))) == pytest.approx(0.31, abs=0.01)


def test_a_short_life_says_nothing_of_memory() -> None:
    assert grown([100] * 80) is None
    assert grown([]) is None
