"""What one request may cost, by what it says: pure checks of its parsed fields."""
