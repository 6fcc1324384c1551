"""A peer as a process: joining, connection to the run, reducer and reports.

`process.join_and_train` is the whole peer; `network.open_reducer` gives a training loop of one's
own the reducer of a run. Both load torch and hivemind, so they are imported from their modules.
"""
