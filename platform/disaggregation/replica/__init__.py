"""Prefill and decode replicas of a model, to each other, over HTTP."""
