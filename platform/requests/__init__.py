"""A client's request on its way from the gateway to an engine, and what is measured of it."""
