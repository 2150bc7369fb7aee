"""Quantized checkpoints: which weights are quantized, how the formats' tensors become weights of four forms."""
