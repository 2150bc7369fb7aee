"""The inference engine: scheduler, model runner, sampler, loader, attention."""
