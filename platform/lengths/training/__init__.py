"""Trains predictors, measures them, and trains them again on served requests."""
