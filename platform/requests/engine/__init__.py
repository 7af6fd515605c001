"""vLLM's engine front end, which checks grammars beside the event loop."""
