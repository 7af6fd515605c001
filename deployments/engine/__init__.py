"""Replicas: one vLLM engine each, behind Ray Serve LLM's classes."""
