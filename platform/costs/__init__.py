"""Cost models: the time of an engine's step, of a static batch, and of moving KV."""
