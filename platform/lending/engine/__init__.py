"""vLLM's scheduler, worker and attention, of which lenders compute a share."""
