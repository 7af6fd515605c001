"""Storage of blocks: an arena in shared memory, and segment files on SSD."""
