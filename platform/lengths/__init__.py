"""Predictions of how many tokens an answer will have."""
