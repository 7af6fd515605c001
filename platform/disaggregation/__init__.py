"""Prefill/decode disaggregation: prompts are computed on other replicas than answers."""
