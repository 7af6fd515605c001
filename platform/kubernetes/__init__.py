"""Loomserve on Kubernetes: what the chart has to know of a configuration, and what a pod needs."""
