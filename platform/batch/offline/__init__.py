"""Offline models: they serve batches only, in static batches on transformers."""
