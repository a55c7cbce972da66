"""Equations in a text: found, checked, counted."""
