"""Experiments: arms × seeds, from one start."""
