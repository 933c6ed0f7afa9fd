"""Settings of Sphinx, which builds these pages as a site: ``make docs``."""

from __future__ import annotations

import inspect
import json
import pydoc
import typing
from dataclasses import asdict, fields, is_dataclass
from importlib.metadata import version as version_of

from docutils import nodes
from pydantic_core import PydanticUndefined
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

project = "stepsnet"
author = "the stepsnet contributors"
version = release = version_of("stepsnet")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # the included README and changelog begin with their own titles

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Shape", "notes_style")]

html_theme = "pydata_sphinx_theme"
html_title = "stepsnet"
html_theme_options = {
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "header_links_before_dropdown": 6,
    "footer_start": [],
    "footer_end": [],
}
html_show_sourcelink = False
html_copy_source = False


class Fields(SphinxDirective):
    """``{fields} stepsnet.config.Augment``: a table of the fields that a class of settings adds to its bases."""

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
                hint = inspect.formatannotation(hints[name]).replace("typing.", "").replace("stepsnet.config.", "")
                hint = hint.replace("|", "\\|")
                lines.append(f"| `{name}` | `{hint}` | {shown} | {field.description or ''} |")
        return self.parse_text_to_nodes("\n".join(lines))


def plain(value: object) -> object:
    """As JSON holds it."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def setup(app: Sphinx) -> None:
    app.add_directive("fields", Fields)
