"""What a report shows about a trained model besides its metrics: ``inspection.json`` in the folder of a run.

A task makes it from validation data when a run has ended (``Task.inspect``), so that reports need no data to draw it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..errors import UserError, in_a_line
from ..files.writing import encodable, write_atomically

__all__ = [
    "INSPECTION",
    "Confusion",
    "Picture",
    "Pictures",
    "Section",
    "Table",
    "Text",
    "Texts",
    "read_inspection",
    "write_inspection",
]

INSPECTION = "inspection.json"
_CONFIG = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")
_Words = Annotated[str, AfterValidator(encodable)]


@dataclass(frozen=True, config=_CONFIG)
class Confusion:
    """How many samples of each class were taken for each class, with at most some 30 classes."""

    classes: list[_Words]
    counts: list[list[int]]  # (true class, predicted class)
    kind: Literal["confusion"] = "confusion"


@dataclass(frozen=True, config=_CONFIG)
class Table:
    heading: _Words
    about: _Words  # how to read it
    columns: list[_Words]
    rows: list[list[_Words]]
    kind: Literal["table"] = "table"


@dataclass(frozen=True, config=_CONFIG)
class Picture:
    content: bytes
    mime: Literal["image/jpeg", "image/png"]
    title: _Words
    detail: _Words = ""


@dataclass(frozen=True, config=_CONFIG)
class Pictures:
    heading: _Words
    about: _Words  # how they were chosen
    pictures: list[Picture]
    is_wide: bool = False  # such as two images side by side
    kind: Literal["pictures"] = "pictures"


@dataclass(frozen=True, config=_CONFIG)
class Text:
    prompt: _Words
    continuation: _Words  # by the model
    original: _Words  # what follows the prompt in the data


@dataclass(frozen=True, config=_CONFIG)
class Texts:
    heading: _Words
    about: _Words  # how they were generated
    texts: list[Text]
    kind: Literal["texts"] = "texts"


Section = Confusion | Table | Pictures | Texts


def write_inspection(folder: Path, sections: Sequence[Section]) -> None:
    """Write ``inspection.json``. Raises UserError if that fails."""
    write_atomically(folder / INSPECTION, _format().dump_json(list(sections), indent=1) + b"\n")


def read_inspection(folder: Path) -> list[Section]:
    """The sections in a run's folder; none for a run that has not ended.

    Raises:
        UserError: the file is damaged, or of a later version.
    """
    file = folder / INSPECTION
    try:
        return _format().validate_json(file.read_bytes()) if file.exists() else []
    except (OSError, ValidationError) as error:
        said = in_a_line(error, 200)
        raise UserError(
            f"report: cannot read {file} ({said}); if you remove it, the page is drawn without it"
        ) from None


@lru_cache(maxsize=1)
def _format() -> TypeAdapter[list[Section]]:
    return TypeAdapter(list[Annotated[Section, Field(discriminator="kind")]])
