"""Files, batches and lines in SQLite."""
