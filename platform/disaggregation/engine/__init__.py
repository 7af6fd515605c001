"""vLLM's engine front end, which hands prompts over to another engine."""
