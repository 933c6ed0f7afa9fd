"""Tasks: the data, the loss and the metrics of one kind of work, for the engine's Task protocol."""
