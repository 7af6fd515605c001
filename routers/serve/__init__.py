"""Ray Serve request routers, which run the routing policies."""
