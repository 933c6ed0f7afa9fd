"""The colors of every figure: distinguishable with each common form of color blindness (Okabe and Ito, 2008)."""

from __future__ import annotations

__all__ = ["OKABE_ITO", "OKABE_ITO_AGAIN"]

OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")

# the same, darker (and black lighter), for figures with more things than colors
OKABE_ITO_AGAIN = (*OKABE_ITO, "#003959", "#6a2f00", "#004f39", "#663c53", "#2b5a74", "#734f00", "#8a8a8a")
