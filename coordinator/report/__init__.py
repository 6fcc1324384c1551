"""A run's status as plain text, for `atoll status`, `atoll rounds` and logs; needs no terminal UI.

`render_status` and `follow` (`plain`) print it, `read` (`feed`) fetches it, `View` (`view`) is what
the dashboard draws.
"""
