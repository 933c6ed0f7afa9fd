"""Settings of Sphinx; ``make docs`` builds these pages as a site."""

from __future__ import annotations

import json
import pydoc
import types
import typing
from dataclasses import asdict, fields, is_dataclass

from docutils import nodes
from pydantic_core import PydanticUndefined
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import stepsnet

project = "stepsnet"
author = "the stepsnet contributors"
version = release = stepsnet.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nb_execution_mode = "force"  # the notebook is kept without outputs
nb_execution_in_temp = True
nb_execution_timeout = 900  # seconds for a cell, on a busy machine
nb_execution_raise_on_error = True
nb_output_stderr = "remove"
nb_merge_streams = True
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # the included README and changelog begin with their own titles

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Shape", "notes_style")]

html_theme = "sphinx_book_theme"
html_title = "stepsnet"
html_theme_options = {
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],
}
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_sourcelink = False
html_copy_source = False


class Fields(SphinxDirective):
    """``{fields} stepsnet.settings.config.Augment``: the fields that a class of settings adds to its bases."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        kind = pydoc.locate(self.arguments[0])
        assert isinstance(kind, type), self.arguments[0]
        inherited = {field.name for base in kind.__bases__ if is_dataclass(base) for field in fields(base)}
        hints = typing.get_type_hints(kind)
        lines = ["| field | type | default | |", "|---|---|---|---|"]
        for name, field in kind.__pydantic_fields__.items():
            if name not in inherited:
                default = field.get_default(call_default_factory=True)
                shown = "" if default is PydanticUndefined else f"`{json.dumps(plain(default))}`"
                hint = readable(hints[name]).replace("|", "\\|")
                lines.append(f"| `{field.alias or name}` | `{hint}` | {shown} | {field.description or ''} |")
        return self.parse_text_to_nodes("\n".join(lines))


def readable(hint: typing.Any) -> str:
    """A type as a reader writes it, such as ``float | None``."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(map(readable, arguments))
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(repr, arguments))
    if arguments:
        inside = ", ".join("…" if argument is Ellipsis else readable(argument) for argument in arguments)
        return f"{typing.get_origin(hint).__name__}[{inside}]"
    return "None" if hint is type(None) else getattr(hint, "__name__", str(hint))


def plain(value: object) -> object:
    """A value as JSON holds it."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def setup(app: Sphinx) -> None:
    app.add_directive("fields", Fields)
