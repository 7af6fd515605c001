"""Prefill and decode on replicas of their own."""
