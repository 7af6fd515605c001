"""Everything of Loomserve that touches vLLM."""
