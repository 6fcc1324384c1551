"""All workers of a run in one process: the arithmetic of rounds without a network."""
