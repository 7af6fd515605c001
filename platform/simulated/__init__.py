"""Simulated engines: they speak as vLLM's do, take a cost model's times, and compute nothing."""
