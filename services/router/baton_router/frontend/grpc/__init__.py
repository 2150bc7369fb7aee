"""The gRPC router service."""
