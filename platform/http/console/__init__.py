"""The web console: plain files that a browser shows, and nothing of what runs.

They are the same for everyone, so that they need no token; what they show comes from the admin API,
which asks for it.
"""
