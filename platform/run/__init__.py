"""One run of the platform on this machine: its folder, its processes, and what they leave."""
