"""Pipelines: a model in stages, and microbatches that peers push from stage to stage.

`hop.Hop` is the machine of one peer; `placement` decides which stage a peer serves.
"""
