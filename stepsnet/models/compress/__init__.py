"""A trained network of one width as the start of a StepsNet of less compute, and how it is distilled: convert.py."""

from .convert import compress
from .distill import Compressed

__all__ = ["Compressed", "compress"]
