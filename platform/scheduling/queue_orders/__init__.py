"""Queue orders, one rule a file. Pure."""
