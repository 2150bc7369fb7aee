"""Grammars in the engine: compiled off its thread, followed token by token, and masks of what may come next."""
