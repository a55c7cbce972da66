"""Answers of mathematics: found in a completion, read, compared."""
