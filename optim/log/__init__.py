"""The replicated log of a run.

entry      records, the chain, certificates, and the rules that make an entry valid
replay     from a state and an entry to the next state, by the run's method
store      the log on disk
replica    a copy of the log and its state; `live`: the same for an event loop
"""
