"""Speculative decoding: several tokens of a sequence per step, the same tokens as without it."""
