"""What a report shows of a trained model besides its metrics: ``inspection.json`` in the folder of a run.

A task makes it from validation data when a run has ended (``Task.inspect``). Reports draw it without the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from .errors import UserError, in_a_line
from .files import write_atomically

__all__ = [
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

FILE = "inspection.json"
_CONFIG = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


@dataclass(frozen=True, config=_CONFIG)
class Confusion:
    """How many samples of each class were taken for each class; for some 30 classes at most."""

    classes: list[str]
    counts: list[list[int]]  # (true class, predicted class)
    kind: Literal["confusion"] = "confusion"


@dataclass(frozen=True, config=_CONFIG)
class Table:
    heading: str
    about: str  # how to read it
    columns: list[str]
    rows: list[list[str]]
    kind: Literal["table"] = "table"


@dataclass(frozen=True, config=_CONFIG)
class Picture:
    content: bytes
    mime: Literal["image/jpeg", "image/png"]
    title: str
    detail: str = ""


@dataclass(frozen=True, config=_CONFIG)
class Pictures:
    heading: str
    about: str  # how they were chosen
    pictures: list[Picture]
    is_wide: bool = False  # such as two images side by side
    kind: Literal["pictures"] = "pictures"


@dataclass(frozen=True, config=_CONFIG)
class Text:
    prompt: str
    continuation: str  # by the model
    original: str  # what follows the prompt in the data


@dataclass(frozen=True, config=_CONFIG)
class Texts:
    heading: str
    about: str  # how they were generated
    texts: list[Text]
    kind: Literal["texts"] = "texts"


Section = Confusion | Table | Pictures | Texts


def write_inspection(folder: Path, sections: Sequence[Section]) -> None:
    """Raises UserError where the file cannot be written."""
    write_atomically(folder / FILE, _format().dump_json(list(sections), indent=1) + b"\n")


def read_inspection(folder: Path) -> list[Section]:
    """What a run's folder shows; nothing for a run that has not ended.

    Raises:
        UserError: the file is damaged, or of a later version.
    """
    file = folder / FILE
    try:
        return _format().validate_json(file.read_bytes()) if file.exists() else []
    except (OSError, ValidationError) as error:
        said = in_a_line(error, 200)
        raise UserError(f"report: cannot read {file} ({said}); without this file, the page leaves it out") from None


@lru_cache(maxsize=1)
def _format() -> TypeAdapter[list[Section]]:
    return TypeAdapter(list[Annotated[Section, Field(discriminator="kind")]])
