"""gRPC plumbing: servers with health, reflection, auth and error mapping; channels; conversions."""
