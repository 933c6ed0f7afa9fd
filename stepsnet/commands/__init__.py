"""The verbs of the command line, a file each: its arguments and its function. cli.py collects them.

A module imports what is heavy inside its functions, so that ``stepsnet --help`` answers at once.
"""
