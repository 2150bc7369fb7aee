"""Speculative decoding: several tokens of a sequence per step, the same ones as without."""
