"""The coordinator as a process: gRPC service, server and metrics.

`serve` and `running` (`server`) start one; they load torch, so they are imported from their module.
"""
