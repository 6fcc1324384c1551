"""The run in a terminal: reads nothing but `RunStatus`.

app.py      DashboardApp, save_screenshot      Textual; imported only where there is a screen
plain.py    lines, follow, render_status       text for logs, pipes and `atoll status`
feed.py     Feed, FeedError                    what both are given
"""
