"""Grafana's dashboards, as pages of questions; ``python -m dashboards`` writes the JSON files.

A panel asks one question, which is its title, and its description says what to do about the answer.
"""
