"""Several stages in a row: recipes, the main job, what a run leaves on disk."""
