"""An engine as one process that only computes, for any number of clients."""
