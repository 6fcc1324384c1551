"""Experiments on one machine: demo, simulator, plans, advice and plots. No peer needs it."""
