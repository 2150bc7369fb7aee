"""``baton quantize``: writes a quantized copy of a checkpoint."""
