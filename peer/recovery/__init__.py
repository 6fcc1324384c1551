"""How a peer catches up: snapshots, missed entries and their sources."""
