"""The colors of every figure, which color-blind readers can tell apart (Okabe and Ito, 2008)."""

OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
