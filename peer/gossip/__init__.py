"""Gossip runs: without a log or a common state, pairs of peers meet in each round.

`engine.Gossip` is the entry point; docs/protocol.md, part "Gossip", has the rules.
"""
