"""Benchmarks, one question a file; run from the repository's root as ``python -m benchmarks.X``."""
