"""The run's shared vocabulary: spec, invite, admissions, keys and status records.

Peers and the coordinator both use it. Nothing is exported here: `invite` and `status` must not load
torch, which `spec` needs through the methods, so each module is imported by its own name.
"""
