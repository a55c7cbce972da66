"""A run of any command: its output folder, the comparison with an earlier run, stop requests, and its stages."""
