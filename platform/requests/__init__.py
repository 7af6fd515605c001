"""Clients' requests on their way from the gateway to an engine, and their metrics."""
