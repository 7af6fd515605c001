"""Replicas: each starts, watches and ends the process of one vLLM engine."""
