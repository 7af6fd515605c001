"""Routing: which replica answers a request, and which requests form static batches."""
