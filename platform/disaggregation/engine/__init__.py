"""A request as the engine of its prompt gets it, and as the one of its answer."""
