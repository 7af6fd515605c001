"""Process that owns the index and the arena, and the protocol by which engines use it."""
