"""What vLLM makes of engines' tokens, as clients get it: texts, and answers of the Messages API."""
