"""KV memory of a borrower and a lender: mapped, lent, copied and given back."""
