from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from atoll.coordinator.run.status import RunStatus
from support import kit as helpers
from support.status import make_staged_status, make_status


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """The helpers of `support.kit`."""
    return helpers


@pytest.fixture
def sample() -> Callable[..., RunStatus]:
    """Makes states of a run."""
    return make_status


@pytest.fixture
def staged() -> Callable[..., RunStatus]:
    """Makes states of a pipeline."""
    return make_staged_status
