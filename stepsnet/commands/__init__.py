"""The verbs of the command line, one file each with its arguments and its function. cli.py collects them.

The modules import heavy packages inside their functions, so that ``stepsnet --help`` answers at once.
"""
