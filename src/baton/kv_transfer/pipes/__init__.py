"""Pipes, one medium per file: tensors in order and, where the medium has it, one-sided reads of remote blocks."""
