"""Deciding a round: its group, its ballots, its certificate, and their dissemination."""
