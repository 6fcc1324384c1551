"""Rounds: peers that do not trust each other decide the log, position after position.

`engine.Rounds` is the entry point. A round finds its group, reduces the group's contributions
(`allreduce`), and agrees on the result by votes (`consensus`). It survives the loss of any peer,
its leader's too, as long as a quorum of electors lives; docs/protocol.md has the rules.
"""
