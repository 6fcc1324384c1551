"""Stages as columns: what fits, what gives way, and what is said of a stage without peers."""

from dataclasses import replace

import pytest

from atoll.coordinator.dashboard.stages import MIN_CELLS, columns, num_columns, num_lines


def drawn(status, width=120, height=20, **options):
    return columns(status, width, height, **options).plain.split("\n")


@pytest.mark.parametrize("width", [1, 23, 79, 80, 200])
@pytest.mark.parametrize("height", [1, 4, 6, 30])
def test_columns_stay_within_their_cells(staged, width, height):
    status = staged(stages=5, peers_a_stage=4)
    rows = drawn(status, width, height)
    assert len(rows) <= height
    assert max(map(len, rows)) <= max(width, MIN_CELLS)


def test_as_many_stages_as_fit(staged):
    status = staged(stages=8)
    assert [num_columns(status, width) for width in (1, 74, 75, 500)] == [1, 2, 3, 8]
    assert num_lines(status) == 5 + 2


def test_a_stage_without_peers_says_so(staged):
    status = staged()
    vacant = replace(status.modules[1], peers=0, binds=True, utilisation=0.9)
    gone = [replace(p, state="gone") if p.module == vacant.name else p for p in status.peers]
    status = replace(status, peers=gone, modules=[status.modules[0], vacant, status.modules[2]])
    rows = drawn(status)
    assert "stage-2 · no peer" in rows[0] and "▲ binds" in rows[0]
    assert "90%" not in rows[2]
    assert "○ coral gone" in rows[5]
    done = replace(status, modules=[replace(vacant, state="finished", binds=False)])
    assert "no peer" not in drawn(done)[0] and "finished" in drawn(done)[1]


def test_peers_beyond_the_height_are_counted(staged):
    rows = drawn(staged(peers_a_stage=6), height=8)
    assert len(rows) == 8
    assert rows[-1].count("and 4 more") == 3


def test_a_narrow_column_keeps_names_rates_and_omissions(staged):
    rows = drawn(staged(), width=3 * MIN_CELLS + 6)
    assert rows[0].count("▲") == 1 and "binds" not in rows[0]
    assert "6 in flight 3 omitted" in rows[4] and "queued" not in rows[4]
    assert "coral" in rows[5] and "tok/s" not in rows[5]


def test_peers_that_moved_to_a_stage_are_counted(staged):
    status = staged()
    reached = replace(status.modules[0], moves=2)
    rows = drawn(replace(status, modules=[reached, *status.modules[1:]]), width=160)
    assert rows[4].count("2 moved in") == rows[4].count("moved in") == 1


def test_stages_before_the_first_in_view_are_left_out(staged):
    status = staged(stages=6)
    rows = drawn(status, width=2 * MIN_CELLS + 3, first=4)
    assert "stage-5" in rows[0] and "stage-6" in rows[0] and "stage-4" not in rows[0]
    assert columns(replace(status, modules=[]), 80, 20).plain == ""
