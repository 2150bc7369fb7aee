"""Helpers for tests of Baton and of what is built on it: tiny real checkpoints, processes, faults."""
