"""The reduction of a group's contributions: owners of parts, relays of rows, and the members.

`exchange.Exchange` is the entry point: one member's exchange. `sides` has its two ends, `Sender`
and `Owner`; `reduction`, `sums` and `factors` the arithmetic; `rows` the relays of large groups.
"""
