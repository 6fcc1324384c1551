"""The coordinator: gRPC service, ledger, checkpoints, invites and the dashboard."""
