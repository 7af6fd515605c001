"""Plans of rebalancing: their states, their history, and the SQLite that keeps both."""
