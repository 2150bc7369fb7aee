"""Weights of GGUF files: from their blocks to the forms that operators take."""
