"""Requests that go on in another engine than the one that began them."""
