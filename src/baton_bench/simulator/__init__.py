"""Deployments on virtual time, placed by the router's own code; used by the planner and by ``baton bench router``."""
