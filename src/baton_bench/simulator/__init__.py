"""Deployments on virtual time."""
