"""API keys: who may send requests, for which models, and how often."""
