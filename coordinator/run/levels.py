"""Levels of events: one scale for the dashboard, programs and Python's logging."""

from __future__ import annotations

import logging
from typing import Literal

Level = Literal["info", "warning", "error"]

LOGGING: dict[Level, int] = {
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
