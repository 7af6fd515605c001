"""Ground of all packages: errors, folders, SQLite, periodic work, actors' replies."""
