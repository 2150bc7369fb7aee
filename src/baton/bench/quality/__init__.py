"""``baton bench quality``: what quantization costs and gives, configurations side by side."""
