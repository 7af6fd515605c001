"""Gateways: they answer clients, and forward to replicas."""
