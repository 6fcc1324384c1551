"""A run's status as plain text: what `status`, `rounds` and logs print; needs no terminal UI."""
