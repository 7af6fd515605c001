"""Where blocks lie: shared memory and SSD."""
