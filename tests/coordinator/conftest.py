from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """The helpers of kit.py, which tests cannot import by name."""
    path = Path(__file__).parent / "kit.py"
    spec = importlib.util.spec_from_file_location("coordinator_kit", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
