"""A trained network of one width as the start of a StepsNet of less compute.

convert.py has :func:`stepsnet.compress`, with an outline of how it works, and the way back from a file. stream_parts.py
finds what reads and writes the stream, folds the norms and rotates the stream; rotation.py chooses the rotation; cut.py
cuts the blocks; and distill.py has the losses.
"""

from .convert import compress, compressed_shape
from .distill import Compressed

__all__ = ["Compressed", "compress", "compressed_shape"]
