"""The process that owns the index, and how engines speak to it."""
