"""Find the final answer in a completion of a mathematics problem, and compare it with the gold answer."""
