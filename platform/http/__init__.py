"""HTTP servers of the platform, and what they have in common."""
