"""Guided decoding: grammars compiled outside the engine's thread, and token masks for each step."""
