"""``stepsnet.export``: a model as a file for another runtime, checked against torch before it is there."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__
from ..errors import UserError
from ..files import flush, require_new
from ..redact import public_value
from ..runs.results import Run
from ..tasks.deployment import Deployment
from .capture import Captured, NotCaptured, capture, first_line, flat_outputs, quiet
from .formats import FORMATS, Format, format_named, format_of, why_not_written
from .sessions import open_session
from .source import Source, find_source

__all__ = ["Exported", "export", "export_model", "write_checked"]

MAX_ERROR = 1e-3  # of an output: the norm of the difference over the norm; rounding gives some 1e-6


@dataclass(frozen=True)
class Exported:
    """An exported model: where it is, what its metadata say, and lines about what could not be left open."""

    path: Path
    metadata: dict[str, Any]
    notes: tuple[str, ...]


def export(
    model: str | Path | Run | nn.Module,
    /,
    path: str | Path | None = None,
    *,
    format: str | None = None,
    features: bool = False,
    weights: str | Path | None = None,
    fixed_size: bool = False,
    force: bool = False,
    note: Callable[[str], None] = lambda text: None,
    input_size: Sequence[int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    classes: Sequence[str] | None = None,
    **model_args: Any,
) -> Exported:
    """Write a model as ONNX, as an archive of torch.export, or as OpenVINO's IR, as ``stepsnet export`` does.

    The size of the batch is left open, and that of the pictures where the model takes any. The file is compared with
    the model in torch, on photographs, at two batch sizes and two picture sizes where these are open (three where
    it takes odd ones), before it gets its name; where something fails, nothing is there.

    Args:
        model: a run or its folder, the name of a model of timm or stepsnet, or a module that takes pictures.
        path: of the file; by default in the current folder, named after the run or the model.
        format: "onnx", "torch" or "openvino"; by default that of the path's suffix, .onnx, .pt2 or .xml, else ONNX.
        features: four feature maps of strides 4, 8, 16 and 32 in place of a classifier's logits. Those of a Swin, a
            ViT, a DeiT or an EVA pass through a LayerNorm that is not trained, and a ViT's are resampled.
        weights: beside a model's name: a run, a file of weights, or ``timm:NAME``. Without it they are random.
        fixed_size: leave only the batch open, which can be faster.
        force: replace what is there.
        note: called with what is being done.
        input_size, mean, std, classes: beside a name or a module: (C, H, W) of a picture, mean and standard deviation
            of each channel for pixels in 0 … 1, and the names of the outputs, for the metadata.
        **model_args: beside a model's name: its arguments, such as ``num_classes=10``.

    Returns:
        The path, and the metadata that :func:`stepsnet.deploy.formats.read_metadata` reads back.

    Raises:
        UserError: there is no such model or format, a package of the extra ``export`` is missing, the
            exporter cannot express the model, or the file's outputs are not those of torch.
    """
    about = {"input_size": input_size, "mean": mean, "std": std, "classes": classes}
    settings: dict[str, Any] = {"features": features, "weights": weights, "fixed_size": fixed_size, "force": force}
    return export_model(model, path, model_args, format=format, note=note, about=about, **settings)


def export_model(
    model: str | Path | Run | nn.Module,
    path: str | Path | None,
    model_args: Mapping[str, Any],
    *,
    format: str | None,
    features: bool,
    weights: str | Path | None,
    fixed_size: bool,
    force: bool,
    note: Callable[[str], None],
    about: Mapping[str, Any] | None = None,
) -> Exported:
    """As :func:`export`, for arguments of the model of any name, such as ``model`` of stepify."""
    if not isinstance(path, (str, Path, type(None))) or not isinstance(format, (str, type(None))):
        raise UserError(f"export: got {path!r} and {format!r}, expected the name of a file and of a format")
    if weights is not None and not (isinstance(weights, (str, Path)) and str(weights)):
        raise UserError(f"--weights: got {weights!r}, expected a run, a file or timm:NAME")
    form = format_named(format) if format is not None else format_of(Path(path)) if path else format_named("onnx")
    form.require()
    if path and Path(path).suffix != form.suffix:
        raise UserError(f"--out: got {path}, expected a name that ends in {form.suffix} for the format {form.name}")
    given = model.folder if isinstance(model, Run) else model
    source = find_source(
        given, features=features, weights=weights, model_args=model_args, about=about, fixed_size=fixed_size
    )
    place = Path(path) if path else Path(f"{source.name}{form.suffix}")
    require_new(form.files(place), force)
    if not source.trained:
        note(f"{source.model_name} has random weights: a run's folder or --weights has trained ones")
    with _staged(form, place, force) as temporary:
        metadata, notes = write_checked(source, form, temporary, fixed_size, note)
    return Exported(place, metadata, (*source.notes, *notes))


def write_checked(
    source: Source, form: Format, path: Path, fixed_size: bool = False, note: Callable[[str], None] = lambda text: None
) -> tuple[dict[str, Any], list[str]]:
    """Write a file with as much left open as the model and the format allow, and compare it with torch.

    Returns:
        The metadata, and a line for each axis that is not open.

    Raises:
        UserError: the format cannot hold the model.
    """
    _check_input(source)
    use, others = source.use, () if fixed_size else source.other_shapes
    named = {axis: name for axis, name in enumerate(use.axes) if name != "channels"}
    reasons = [] if others or fixed_size else ["its windows or positions are laid out for it"]
    is_of_format = False
    for axes in (*([named] if others else []), {0: named[0]}, {}):
        note(f"exporting {source.model_name} to {form.name}, open: {', '.join(axes.values()) or 'nothing'}")
        try:
            metadata = _attempt(source, form, path, axes, others if len(axes) > 1 else ())
        except UserError as error:
            reasons.append(str(error))
            is_of_format = not isinstance(error, NotCaptured)  # all formats are made of what torch captures
            if len(axes) == 1 and is_of_format:
                break  # what a format lacks, it lacks for one sample too
            continue
        return metadata, _fixed(use, axes, reasons)
    known = " or ".join(name for name in FORMATS if name != form.name)
    advice = f"; expected --format {known}" if is_of_format else ""
    raise UserError(f"export: {form.name} cannot hold {source.model_name}: {reasons[-1]}{advice}")


def _check_input(source: Source) -> None:
    """Raises UserError where the model does not take such pictures, of which torch.export would write pages."""
    shape = source.use.shape
    if source.use.axes[1] == "tokens":
        return
    try:
        with torch.inference_mode(), quiet():
            source.model(source.inputs(1, shape))
    except Exception as error:  # whatever the model's own code raises
        raise UserError(
            f"export: {source.model_name} does not take pictures of {'×'.join(map(str, shape))} ({first_line(error)}), "
            "expected a model of pictures, whose size input_size= gives, or a language model in steps"
        ) from error


def _fixed(use: Deployment, axes: dict[int, str], reasons: Sequence[str]) -> list[str]:
    """A line about each axis that is not open, with the reason."""
    lines = [] if 0 in axes else [f"the batch is fixed at 1: {reasons[-1]}"]
    if len(axes) < 2:
        size = "×".join(str(size) for size, axis in zip(use.shape, use.axes[1:]) if axis != "channels")
        lines.append(f"the size is fixed at {size}{f': {reasons[0]}' if reasons else ''}")
    return lines


def _attempt(
    source: Source, form: Format, path: Path, axes: dict[int, str], others: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Write with these axes open, and check at this and other shapes. Raises UserError where any of it fails."""
    shape = source.use.shape
    # the larger example: torch.export takes what is one pixel wide in it, such as a last map, for fixed
    example = source.inputs(2 if axes else 1, others[0] if others else shape)
    captured = capture(source.model, example, source.use.input, axes)
    cases = [source.inputs(count, shape) for count in ((1, 3) if axes else (1,))]
    cases += [source.inputs(2, other) for other in others]
    with torch.inference_mode():
        returned = [source.model(x) for x in cases]
    found = [flat_outputs(one) for one in returned]
    names = _names_of(source.use, returned[0], found[0])
    if source.use.outputs and names != source.use.outputs:  # it is no classifier
        source = replace(source, use=replace(source.use, task="features"))
    metadata = _describe(source, captured, names, found, cases)
    try:
        form.write(captured, names, json.dumps(metadata), path)
        session = open_session(path)
        worst = _largest([_error(session(x), expected) for x, expected in zip(cases, found)])
    except Exception as error:  # an exporter raises what it likes
        raise UserError(why_not_written(form, error)) from error
    if not worst <= MAX_ERROR:  # a NaN is no success either
        raise UserError(f"its outputs differ from torch's by {worst:.1e} of their norm, expected at most {MAX_ERROR}")
    return metadata


def _names_of(use: Deployment, returned: Any, tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """The outputs' names: as the use has them, where it has as many, as the model calls them, or numbers."""
    if len(use.outputs) == len(tensors):
        return use.outputs
    if isinstance(returned, Mapping) and all(isinstance(name, str) for name in returned):
        return tuple(returned)
    kind = "map" if all(one.ndim == 4 for one in tensors) else "output"
    return tuple(f"{kind}_{number}" for number in range(1, len(tensors) + 1))


def _error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest norm of a difference over the norm of an output."""
    if len(got) != len(expected):
        raise UserError(f"it has {len(got)} outputs, expected {len(expected)}")
    errors = []
    for ours, theirs in zip(got, expected):
        if ours.shape != theirs.shape:
            raise UserError(f"an output has the shape {tuple(ours.shape)}, expected {tuple(theirs.shape)}")
        errors.append(((ours - theirs).norm() / theirs.norm().clamp(min=1e-12)).item())
    return _largest(errors)


def _largest(errors: Sequence[float]) -> float:
    """A NaN where one is: Python's own maximum passes over it."""
    return torch.tensor(errors).max().item()


def _describe(
    source: Source, captured: Captured, outputs: Sequence[str], found: list[list[Tensor]], cases: list[Tensor]
) -> dict[str, Any]:
    """The metadata, of plain values."""
    use = source.use
    described: dict[str, Any] = {
        "stepsnet": __version__,
        "task": use.task,
        "model": public_value(source.model_name),
        "inputs": [{"name": use.input, "dtype": use.dtype, "shape": captured.input_shape}],
        "outputs": [
            {"name": name, "shape": _sizes_of(ones, captured.input_shape, cases)}
            for name, *ones in zip(outputs, *found, strict=True)
        ],
        "preprocessing": use.preprocessing,
        "classes": list(use.classes) if use.classes else None,
        "tokenizer": use.tokenizer,
        "checked_shapes": [list(x.shape) for x in cases],
    }
    return json.loads(json.dumps(described))


def _sizes_of(ones: Sequence[Tensor], input_shape: Sequence[int | str], cases: Sequence[Tensor]) -> list[Any]:
    """An output's sizes: a number where inputs of all sizes have the same, as where it has no batch.

    Where it is always as long as an open axis of the input, that axis' name; None for what depends on it otherwise.
    """
    open_axes = [axis for axis, name in enumerate(input_shape) if isinstance(name, str)]
    found: list[Any] = []
    for axis, sizes in enumerate(zip(*(one.shape for one in ones))):
        if len(set(sizes)) == 1:
            found.append(sizes[0])
            continue
        like = [one for one in open_axes if sizes == tuple(x.shape[one] for x in cases)]
        same = axis if axis in like else like[0] if len(like) == 1 else None
        found.append(None if same is None else input_shape[same])
    return found


@contextmanager
def _staged(form: Format, place: Path, force: bool) -> Iterator[Path]:
    """A path in a folder beside ``place``; its files take their names when the block has ended well.

    Where there are two, the one that is opened comes last, and an older one goes first: whatever happens, a file that
    is there has the other beside it that it was written with.
    """
    folder = place.with_name(f".{place.name}.{secrets.token_hex(8)}.tmp")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        yield folder / place.name
        written = form.files(folder / place.name)
        for file in written:
            flush(file)
        require_new(form.files(place), force)  # again: what has come meanwhile is somebody's
        if len(written) > 1:
            place.unlink(missing_ok=True)
        for file, target in zip(written, form.files(place)):
            os.replace(file, target)
    except OSError as error:
        raise UserError(f"cannot write {place}: {error.strerror or first_line(error)}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
