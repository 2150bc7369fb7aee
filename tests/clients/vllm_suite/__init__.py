"""What vLLM's own tests, unmodified, need to run against Baton: ``adapter`` is a pytest plugin of theirs."""
