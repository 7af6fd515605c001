"""Measures what steps, copies, stages and devices take."""
