"""vLLM's serving layer on an engine client of ours, which has several replicas."""
