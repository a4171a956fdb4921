"""The doors of jaxinfer: a gRPC server with its engine on a thread of its own, and a Python client."""
