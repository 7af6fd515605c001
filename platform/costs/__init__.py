"""Predictions of what things cost: the time of an engine's step, and of moving KV."""
