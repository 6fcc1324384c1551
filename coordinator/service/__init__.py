"""The coordinator as a process: gRPC service, server and metrics."""
