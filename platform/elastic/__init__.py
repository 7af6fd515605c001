"""Models that come and go with their requests: they sleep, wake, are unloaded and loaded."""
