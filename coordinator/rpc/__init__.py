"""gRPC between peers and coordinator: the wire format, TLS channels and the client."""
