"""Planning of moves from hot devices to cold ones: BanaServe's algorithm 4-1. Pure."""
