"""Programs behind walls, and the pool of worker processes."""
