"""Options of vLLM: which there are, and what it makes of them."""
