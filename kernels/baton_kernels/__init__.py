"""Operators of the engine: per operation a kernel, a plain-torch reference, a test and a benchmark under one name."""
