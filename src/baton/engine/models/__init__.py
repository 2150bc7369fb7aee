"""Models: checkpoints, loading, the generic and the fused way to run one, and its parts per rank."""
