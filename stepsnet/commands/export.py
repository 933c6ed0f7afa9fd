"""`stepsnet export`: a model as a file for ONNX Runtime, OpenVINO or torch without stepsnet."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..files.writing import dump_json
from ..output.terminal import say
from .options import add_json_option

HELP = "write a model as a file for other runtimes: ONNX, OpenVINO or torch.export"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the folder of a run, or a timm or StepsNet name")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="with a name: arguments of the model"
    )
    parser.add_argument("--format", help="onnx, torch or openvino (default: by the suffix of --out, else onnx)")
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="file that ends in .onnx, .pt2 or .xml (default: here, named after the run or the model)",
    )
    parser.add_argument(
        "--features", action="store_true", help="export a backbone: four feature maps in place of logits"
    )
    parser.add_argument("--weights", metavar="FILE", help="with a name: a run, a file of weights, or timm:NAME")
    parser.add_argument(
        "--fixed-size", action="store_true", help="fix every size but the batch size, which can be faster"
    )
    parser.add_argument("--force", action="store_true", help="replace what is there")
    add_json_option(parser, "the metadata")


def run(options: argparse.Namespace) -> None:
    from ..output.console import working
    from ..settings.overrides import parse_assignments

    with working(f"exporting {options.model}"):
        from ..deploy.export import export_model  # takes seconds

        exported = export_model(
            options.model,
            options.out,
            parse_assignments(options.overrides, "model"),
            format=options.format,
            features=options.features,
            weights=options.weights,
            fixed_size=options.fixed_size,
            force=options.force,
            note=lambda text: say(f"stepsnet: {text}", error=True),
        )
    if options.json:
        say(dump_json({"path": str(exported.path), "notes": exported.notes, **exported.metadata}))
        return
    metadata = exported.metadata
    sizes = ["×".join(str(size or "?") for size in one["shape"]) for one in (*metadata["inputs"], *metadata["outputs"])]
    compared = "a text" if metadata["task"] == "language" else "photographs"
    say(f"{exported.path}: {sizes[0]} → {', '.join(sizes[1:])}, the same as torch's on {compared}")
    for line in exported.notes:
        say(line)
