"""The parts that decide for vLLM's scheduler, each over a narrow view of it."""
