"""Gateways: endpoints for clients and the batch lane, forwarded to engine replicas."""
