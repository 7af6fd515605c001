"""Ground of all packages: errors, folders, loopback, SQLite, periodic work, actors' replies."""
