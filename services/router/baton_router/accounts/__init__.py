"""API keys and the tenants they belong to."""
