from __future__ import annotations

from types import ModuleType

import pytest

from support import kit as helpers


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """The helpers of `support.kit`."""
    return helpers
