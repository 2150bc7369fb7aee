"""How many prefill and how many decode instances: measured speeds, a simulator, and a search over it."""
