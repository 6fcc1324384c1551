"""The reduction of a group's contributions: owners of parts, relays of rows, and the members."""
