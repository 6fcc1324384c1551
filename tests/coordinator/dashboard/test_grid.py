from hypothesis import given
from hypothesis import strategies as st
from textual.content import Content

from atoll.coordinator.dashboard.grid import Column, GridState, chosen, render

COLUMNS = [
    Column(title="name", width=6, grow_to=10, priority=0, draw=lambda r, w: Content(str(r))),
    Column(title="a", width=4, priority=2, draw=lambda r, w: Content("1"), right=True),
    Column(title="b", width=4, priority=1, draw=lambda r, w: Content("2")),
]


def titles(width):
    return [column.title for column, _ in chosen(COLUMNS, width)]


def test_columns_leave_by_priority():
    assert titles(16) == ["name", "a", "b"]
    assert titles(15) == ["name", "b"]
    assert titles(10) == ["name"]
    assert titles(3) == ["name"]


def test_flexible_columns_grow_to_their_limit():
    assert [cells for _, cells in chosen(COLUMNS, 18)] == [8, 4, 4]
    assert [cells for _, cells in chosen(COLUMNS, 60)] == [10, 4, 4]


def test_rows_are_aligned_under_their_titles():
    text = render(COLUMNS, ["x", "y"], 16, 5, GridState()).plain
    assert text.split("\n") == ["name      a b   ", "x         1 2   ", "y         1 2   "]


def test_a_long_cell_is_cut():
    assert "aaaaa…" in render(COLUMNS, ["a" * 50], 16, 5, GridState()).plain


def test_the_cursor_stays_in_view_and_a_scrollbar_appears():
    state = GridState()
    rows = list(range(100))
    state.move(50, 100, 4)
    lines = render(COLUMNS, rows, 20, 5, state).plain.split("\n")
    assert [line.split()[0] for line in lines[1:]] == ["47", "48", "49", "50"]
    assert sum("┃" in line for line in lines) == 1


def test_a_shrinking_table_keeps_the_cursor_inside():
    state = GridState(cursor=50, top=47)
    lines = render(COLUMNS, ["only"], 20, 5, state).plain.split("\n")
    assert (state.cursor, state.top) == (0, 0)
    assert len(lines) == 2


@given(st.integers(0, 100), st.integers(0, 20), st.integers(0, 200), st.integers(-300, 300))
def test_render_never_exceeds_its_box(width, height, num_rows, move):
    state = GridState()
    state.move(move, num_rows, max(1, height - 1))
    text = render(COLUMNS, ["名" * 9] * num_rows, width, height, state).plain
    lines = [Content(line) for line in text.split("\n")]
    assert len(lines) <= max(1, height)
    assert all(line.cell_length <= max(0, width) for line in lines)
