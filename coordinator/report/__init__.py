"""A run's status as plain text, for `atoll status`, `atoll rounds` and logs, without a terminal."""

from atoll.coordinator.report.feed import Feed, FeedError, read
from atoll.coordinator.report.plain import follow, lines, render_status, round_line

__all__ = ["Feed", "FeedError", "follow", "lines", "read", "render_status", "round_line"]
