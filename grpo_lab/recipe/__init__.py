"""Recipes: their YAML, their sections, and everything that they name, loaded and checked."""
