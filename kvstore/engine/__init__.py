"""Connector of vLLM to the store, and the threads that copy blocks beside an engine's steps."""
