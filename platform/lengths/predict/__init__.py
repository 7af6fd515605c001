"""Predictors of output length, and the features that they see of a request."""
