"""The run in a terminal: reads nothing but `RunStatus`."""
