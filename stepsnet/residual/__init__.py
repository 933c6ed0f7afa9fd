"""Ways to wire a deep residual stream, one file each: ``stepsnet.residual.connect(blocks, "mhc", streams=4)``."""

import timm  # noqa: F401 - first: with timm the models are registered, which need what follows

from .branches import BranchParts
from .connected import ConnectedBlock, ConnectedSequence
from .design import Connection, DesignPart, Place, Wiring
from .joining import connect, design_of
from .known_blocks import declare_branches
from .source_sum import SourceSum
from .table import DESIGNS

__all__ = [
    "DESIGNS",
    "BranchParts",
    "ConnectedBlock",
    "ConnectedSequence",
    "Connection",
    "DesignPart",
    "Place",
    "SourceSum",
    "Wiring",
    "connect",
    "declare_branches",
    "design_of",
]
