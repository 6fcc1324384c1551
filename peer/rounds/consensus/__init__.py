"""Agreement on one entry a position: its group, its ballots, its certificate, its dissemination.

The rules are machines without sockets, which tests drive through every order of events: `round`
for the leader, `member` for its members. Drivers do what the machines ask for.
"""
