"""The folder of a run: who may train in it, its weights, and what a run records about itself."""
