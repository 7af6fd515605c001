"""Predictors of output length, and what they see of a request."""
