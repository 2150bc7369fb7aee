"""Formats of quantized checkpoints, one file each: see :data:`baton.engine.quantization.base.ReadFormat`."""
