"""What prefill and decode services have in common: the engine's thread, KV events, registration, start and drain."""
