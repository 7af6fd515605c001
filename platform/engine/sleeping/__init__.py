"""What an engine gives back while it sleeps, and how it wakes."""
