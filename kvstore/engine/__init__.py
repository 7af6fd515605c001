"""vLLM's connector to the store, and the copies beside its steps."""
