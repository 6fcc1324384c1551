"""A peer as a process: joining, connection to the run, reducer and reports."""
