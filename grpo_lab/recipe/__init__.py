"""What a recipe says: its YAML, its sections, and everything that it names, resolved once."""
