"""Whole deployments; a package, so that its tests share one (``up`` of ``conftest.py``)."""
