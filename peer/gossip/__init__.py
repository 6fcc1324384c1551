"""Gossip runs: without a log or a common state, pairs of peers meet in each round.

`Gossip` runs the meetings of one peer; docs/protocol.md, part "Gossip", has the rules.
"""

from atoll.peer.gossip.engine import Gossip

__all__ = ["Gossip"]
