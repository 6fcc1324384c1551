"""gRPC between peers and the coordinator: messages, pinned TLS channels and the client.

`StatusClient` (`channel`) asks for the status alone and loads no torch; `CoordinatorClient`
(`client`) joins a run. Errors are in `client_errors`.
"""
