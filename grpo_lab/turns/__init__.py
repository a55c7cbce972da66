"""Turns with tools: trajectories that go on by themselves, the calls of their tools, and how tokens are joined.

Nothing here knows TRL or an engine: the loop asks a ``TurnEngine`` (``protocols``).
"""
