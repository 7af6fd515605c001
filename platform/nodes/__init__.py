"""The nodes of a platform: how one is started and kept, and what it offers."""
