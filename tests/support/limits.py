"""The limit of waits for real processes, which only a test that fails reaches.

A process that imports torch is there within some seconds on an idle machine, and within a minute on
a slow one that other tests use as well. A test waits for several of them.
"""

DEADLINE_S = 240.0
