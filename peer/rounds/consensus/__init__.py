"""What becomes of a round: its group, its votes, its certificate, and how all learn of them."""
