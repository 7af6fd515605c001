"""The task ring in shared memory, and what borrower and lender do with it."""
