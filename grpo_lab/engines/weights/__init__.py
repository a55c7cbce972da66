"""The policy's weights into an engine, and the proof that they arrived."""
