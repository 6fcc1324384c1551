"""The peer: trainer, data, models, rounds, recovery and the commands."""
