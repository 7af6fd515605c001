"""How waiting requests form static batches, and which batch is next. Pure."""
