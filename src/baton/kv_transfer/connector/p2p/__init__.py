"""Point-to-point hand-over from a prefill to a decode instance."""
