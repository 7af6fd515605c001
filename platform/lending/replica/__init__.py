"""Loans between replicas: opened, kept and ended over HTTP."""
