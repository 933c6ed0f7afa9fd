"""Data sets of the Hugging Face hub, or local folders in its layout: ``hfds:NAME``, of images and of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import UserError, import_extra, in_a_line

__all__ = ["HubName", "columns_of", "load_hub"]


class HubName(NamedTuple):
    """``NAME``, ``NAME:CONFIG`` or ``NAME:CONFIG:COLUMN``; an empty CONFIG is the default configuration."""

    name: str
    config: str = ""
    column: str = ""

    @classmethod
    def of(cls, path: str) -> HubName:
        """Raises UserError for more than three parts."""
        parts = path.split(":")
        if len(parts) > len(cls._fields):
            raise UserError(f"data: got hfds:{path}, expected hfds:NAME, hfds:NAME:CONFIG or hfds:NAME:CONFIG:COLUMN")
        return cls(*parts)


def load_hub(asked: HubName, split: str | None = None) -> Any:
    """The data set, or one of its splits; None if there is no such split.

    Raises:
        UserError: it cannot be loaded, for whatever reason of the hub, the network or the files.
    """
    load_dataset = import_extra("datasets", "data").load_dataset
    try:
        return load_dataset(asked.name, asked.config or None, split=split)
    except Exception as error:
        if split is not None and isinstance(error, ValueError) and f'Unknown split "{split}"' in str(error):
            return None
        hint = "; hfds:NAME::COLUMN names a column" if asked.config and not asked.column else ""
        of_config = f" in the configuration {asked.config}" if asked.config else ""
        raise UserError(f"data: cannot load hfds:{asked.name}{of_config}: {in_a_line(error, 300)}{hint}") from None


def columns_of(features: Mapping[str, Any]) -> str:
    """The columns and their types, for messages."""
    types = {name: getattr(kind, "dtype", None) or type(kind).__name__ for name, kind in features.items()}
    return ", ".join(f"{name}: {kind}" for name, kind in types.items())
