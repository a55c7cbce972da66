"""Sync of the policy's weights into an engine, and the proof that they arrived."""
