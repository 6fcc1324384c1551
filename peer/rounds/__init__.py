"""Rounds: rendezvous, reduction, repair, votes and certificates of one position of the log."""
