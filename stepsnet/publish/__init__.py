"""Runs as repositories for others: a folder in the form of timm, transformers or stepsnet, its card, and the hub."""
