"""Experiments on one machine: demo, baseline, simulator, plans, advice and plots.

No peer that trains imports this package. It imports nothing itself, so that a command pays only
for the modules that it uses.
"""
