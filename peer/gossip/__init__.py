"""Runs by gossip: no log and no common state; two peers meet each round (docs/protocol.md)."""
