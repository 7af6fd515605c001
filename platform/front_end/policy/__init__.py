"""Which replicas are lost, and what becomes of the requests that they had. Pure."""
