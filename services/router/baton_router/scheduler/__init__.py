"""Placement: which instances serve a request."""
