"""Recipes: their YAML, their sections, and everything that they name, resolved once."""
