"""Lending's part in the scheduler's steps: hooks of a borrower and of a lender."""
