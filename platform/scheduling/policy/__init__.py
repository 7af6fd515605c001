"""Who is served first, who is preempted, and how. Pure."""
