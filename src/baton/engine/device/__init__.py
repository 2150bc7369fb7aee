"""What the engine knows of the device that it computes on: which it is, its memory, the KV pool there, host staging."""
