"""The dashboard: a run in a terminal, drawn from `RunStatus` alone.

`DashboardApp` and `save_screenshot` need Textual, an optional dependency, when they are first used.
`marks`, `chart` and `grid` are pure: numbers in, text out.
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.coordinator.dashboard.app import DashboardApp, save_screenshot

__all__ = ["DashboardApp", "save_screenshot"]

__getattr__ = exports(__name__, {"DashboardApp": "app", "save_screenshot": "app"})
