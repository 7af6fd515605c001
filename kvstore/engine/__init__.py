"""Connector of vLLM to the store: what it looks up, saves and swaps."""
