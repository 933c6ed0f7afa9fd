"""What the paper prints, and the model behind each printed row."""
