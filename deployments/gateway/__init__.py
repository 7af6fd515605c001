"""Gateways: endpoints for clients and the batch lane, and the front ends of all models."""
