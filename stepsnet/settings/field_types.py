"""The types of fields that settings and declarations of studies share, and how strictly pydantic reads them."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

__all__ = ["STRICT", "BelowOne", "Count", "Factor", "Positive", "Share", "Side"]

# Strict: "3" is not a number and true is not 1. By the rules of JSON a list fills a tuple and 1 a float.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, validate_by_name=True, validate_by_alias=True)
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=2**31)]
Factor = Annotated[float, Field(ge=1e-2, le=1e2)]  # of a size
Side = Annotated[int, Field(ge=1, le=2**16)]  # in pixels
Count = Annotated[int, Field(ge=1, le=2**31)]
