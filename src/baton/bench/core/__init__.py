"""What all benchmarks share."""
