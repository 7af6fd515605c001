"""What every package stands on: errors, folders, and helpers without a feature of their own."""
