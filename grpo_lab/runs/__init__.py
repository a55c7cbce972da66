"""A run of any command: its folder, whether it is the same one, being asked to stop, and its stages."""
