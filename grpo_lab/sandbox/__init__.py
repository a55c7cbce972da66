"""Run model-written programs behind walls, in a pool of worker processes."""
