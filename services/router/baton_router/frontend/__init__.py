"""What clients of the router speak to: HTTP, gRPC, and the console."""
