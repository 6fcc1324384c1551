"""Small cells, so that a vector of a test has many."""

import pytest

from atoll.optim.state import layout, pieces


def use_cells(patch: pytest.MonkeyPatch, values: int) -> None:
    """Let cells have so many values until the patch is undone."""
    for module in (layout, pieces):
        patch.setattr(module, "CELL", values)
