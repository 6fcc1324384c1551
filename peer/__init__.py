"""The peer: training, rounds, recovery, gossip, the daemon, the lab and the command line."""
