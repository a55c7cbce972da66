"""Commands made of several stages: their recipes, the main training job, and what a run leaves on disk."""
