"""Quantized checkpoints: what ``quantization_config`` says, how the formats' tensors become weights of four forms."""
