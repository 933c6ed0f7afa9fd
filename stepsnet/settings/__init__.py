"""Settings: every field of a recipe, changes to it from text, user modules that it names, and what it may fetch."""
