"""The router's interfaces: OpenAI's HTTP interface, gRPC, the console."""
