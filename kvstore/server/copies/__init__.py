"""Copies of blocks by threads: to SSD and back, and from other nodes."""
