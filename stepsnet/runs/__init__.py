"""Runs: one from its recipe to its summary, the metrics of one, and many side by side as processes."""
