"""The only training loop. It knows no task and no model by name."""
