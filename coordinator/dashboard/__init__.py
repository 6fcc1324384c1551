"""The dashboard: a run in a terminal, drawn from `RunStatus` alone.

`DashboardApp` and `save_screenshot` (`app`) need Textual, an optional dependency, so they are
imported from their module. `marks`, `chart` and `grid` are pure: numbers in, text out.
"""
