"""vLLM's engine front end that hands prompts over to another engine."""
