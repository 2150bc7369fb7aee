"""The version of Baton, read by the build and reported by every service."""

__version__ = "0.1.0"
