"""The prefill service of Baton."""
