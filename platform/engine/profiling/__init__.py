"""Measurement of an engine's steps, KV transfers, pipeline stages and devices."""
