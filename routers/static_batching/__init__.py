"""Policies that form static batches of waiting requests, and choose the next batch. Pure."""
