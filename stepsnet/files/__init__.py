"""Files: written as a whole, read from outside, replaced only if they are ours, and computed once per data set."""
