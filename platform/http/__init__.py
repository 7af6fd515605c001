"""HTTP server, its bounds, and helpers that all HTTP endpoints of the platform share."""
