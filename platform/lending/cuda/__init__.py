"""Lending between GPUs: the kernels of a borrower and of a lender, over a task buffer."""
