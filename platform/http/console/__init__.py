"""The web console: static files without secrets, which ask the admin API."""
