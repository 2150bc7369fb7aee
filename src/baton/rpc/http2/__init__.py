"""gRPC calls over a connection that the event loop reads itself, for streams with many small messages."""
