"""Catching up: snapshots, missed entries and their sources."""
