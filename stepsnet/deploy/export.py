"""``stepsnet.export``: a model as a file for another runtime, checked against torch before it appears."""

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
from ..errors import UserError, in_a_line
from ..files.writing import flush, require_new
from ..output.redact import public_value
from ..runs.results import Run
from ..tasks.deployment import Deployment
from .capture import Captured, NotCaptured, capture, flat_outputs, quiet
from .formats import FORMATS, Format, format_named, format_of, why_not_written
from .sessions import open_session
from .source import Source, find_source

__all__ = ["Exported", "export", "export_model", "write_checked"]

MAX_ERROR = 1e-3  # of an output: the norm of the difference over the norm; rounding alone gives about 1e-6


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
    """Write a model as ONNX, as a torch.export archive or as OpenVINO's IR, as ``stepsnet export`` does.

    The batch size is left open, and so is the picture size if the model takes any. Before the file gets its name, it is
    compared with the model in torch, on photographs (a language model on a text), at two batch sizes and two picture
    sizes if these are open (three if the model takes odd ones). If anything fails, no new file is left behind.

    Args:
        model: a run or its folder, the name of a timm or stepsnet model, or a module that takes pictures.
        path: the file to write; by default in the current folder, named after the run or the model.
        format: "onnx", "torch" or "openvino"; by default that of the path's suffix (.onnx, .pt2 or .xml), or ONNX if
            there is no path.
        features: four feature maps of strides 4, 8, 16 and 32 in place of a classifier's logits. Those of a Swin, a
            ViT, a DeiT or an EVA pass through a LayerNorm that is not trained, and a ViT's are resampled.
        weights: with a model's name: a run, a file of weights, or ``timm:NAME``. By default the weights are random.
        fixed_size: leave only the batch open, which can be faster.
        force: replace existing files.
        note: called with messages about what is being done.
        input_size, mean, std, classes: with a name or a module: the (C, H, W) of a picture, the mean and standard
            deviation of each channel for pixels in 0 … 1, and the name of each class, for the metadata.
        **model_args: with a model's name: its arguments, such as ``num_classes=10``.

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
    """As :func:`export`, with the model's arguments as a mapping: any name may occur, such as stepify's ``model``."""
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
        note(f"{source.model_name} has random weights (give a run's folder or --weights for trained ones)")
    with _staged(form, place, force) as temporary:
        metadata, notes = write_checked(source, form, temporary, fixed_size, note)
    return Exported(place, metadata, (*source.notes, *notes))


def write_checked(
    source: Source, form: Format, path: Path, fixed_size: bool = False, note: Callable[[str], None] = lambda text: None
) -> tuple[dict[str, Any], list[str]]:
    """Write a file with as many axes open as the model and the format allow, and compare it with torch.

    Returns:
        The metadata, and a line for each axis that is not open.

    Raises:
        UserError: the format cannot hold the model.
    """
    _check_input(source)
    use, others = source.use, () if fixed_size else source.other_shapes
    named = {axis: name for axis, name in enumerate(use.axes) if name != "channels"}
    reasons = [] if others or fixed_size else ["the model's windows or positions are laid out for it"]
    is_of_format = False
    for axes in (*([named] if others else []), {0: named[0]}, {}):
        note(f"exporting {source.model_name} to {form.name}, open axes: {', '.join(axes.values()) or 'none'}")
        try:
            metadata = _attempt(source, form, path, axes, others if len(axes) > 1 else ())
        except UserError as error:
            reasons.append(str(error))
            is_of_format = not isinstance(error, NotCaptured)  # every format is made from what torch captures
            if len(axes) == 1 and is_of_format:
                break  # what a format lacks, it lacks for one sample too
            continue
        return metadata, _fixed(use, axes, reasons)
    known = " or ".join(name for name in FORMATS if name != form.name)
    advice = f"; expected --format {known}" if is_of_format else ""
    raise UserError(f"export: {form.name} cannot hold {source.model_name}: {reasons[-1]}{advice}")


def _check_input(source: Source) -> None:
    """Raises UserError if the model does not take such pictures; torch.export's own error would run to pages."""
    shape = source.use.shape
    if source.use.axes[1] == "tokens":
        return
    try:
        with torch.inference_mode(), quiet():
            source.model(source.inputs(1, shape))
    except Exception as error:  # whatever the model's own code raises
        said = in_a_line(error, 200, with_type=True)
        raise UserError(
            f"export: {source.model_name} does not take pictures of {'×'.join(map(str, shape))} ({said}), "
            "expected a model that does (input_size= gives another size), or a language model in steps"
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
    """Write the file with these axes open, and check it at several shapes. Raises UserError if anything fails."""
    shape = source.use.shape
    # the larger size: torch.export treats as fixed what is one pixel wide in the example, such as a last map
    example = source.inputs(2 if axes else 1, others[0] if others else shape)
    captured = capture(source.model, example, source.use.input, axes)
    cases = [source.inputs(count, shape) for count in ((1, 3) if axes else (1,))]
    cases += [source.inputs(2, other) for other in others]
    with torch.inference_mode():
        returned = [source.model(x) for x in cases]
    found = [flat_outputs(one) for one in returned]
    names = _names_of(source.use, returned[0], found[0])
    if source.use.outputs and names != source.use.outputs:  # it is not a classifier
        source = replace(source, use=replace(source.use, task="features"))
    metadata = _describe(source, captured, names, found, cases)
    try:
        form.write(captured, names, json.dumps(metadata), path)
        session = open_session(path)
        worst = _largest([_error(session(x), expected) for x, expected in zip(cases, found)])
    except Exception as error:  # an exporter raises what it likes
        raise UserError(why_not_written(form, error)) from error
    if not worst <= MAX_ERROR:  # and not `>`, so that a NaN fails too
        raise UserError(f"its outputs differ from torch's by {worst:.1e} of their norm, expected at most {MAX_ERROR}")
    return metadata


def _names_of(use: Deployment, returned: Any, tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """The outputs' names: those of ``use`` if it has as many, else those that the model gives, else numbered ones."""
    if len(use.outputs) == len(tensors):
        return use.outputs
    if isinstance(returned, Mapping) and all(isinstance(name, str) for name in returned):
        return tuple(returned)
    kind = "map" if all(one.ndim == 4 for one in tensors) else "output"
    return tuple(f"{kind}_{number}" for number in range(1, len(tensors) + 1))


def _error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative error of an output: the norm of the difference over the expected output's norm."""
    if len(got) != len(expected):
        raise UserError(f"it has {len(got)} outputs, expected {len(expected)}")
    errors = []
    for ours, theirs in zip(got, expected):
        if ours.shape != theirs.shape:
            raise UserError(f"an output has the shape {tuple(ours.shape)}, expected {tuple(theirs.shape)}")
        errors.append(((ours - theirs).norm() / theirs.norm().clamp(min=1e-12)).item())
    return _largest(errors)


def _largest(errors: Sequence[float]) -> float:
    """The maximum, or NaN if there is one, which Python's own ``max`` may pass over."""
    return torch.tensor(errors).max().item()


def _describe(
    source: Source, captured: Captured, outputs: Sequence[str], found: list[list[Tensor]], cases: list[Tensor]
) -> dict[str, Any]:
    """The metadata, as plain values of JSON."""
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
    """An output's size along each axis: a number if it is the same for all inputs, as in an output without a batch.

    The name of an open axis of the input if it always equals that axis' size; None if it varies otherwise.
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
    """A path in a temporary folder beside ``place``; if the block succeeds, the files there are moved into place.

    If there are two, the one that users open is moved last, and an older one is removed first: whatever happens, if it
    exists, the other file that it was written with is beside it.
    """
    folder = place.with_name(f".{place.name}.{secrets.token_hex(8)}.tmp")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        yield folder / place.name
        written = form.files(folder / place.name)
        for file in written:
            flush(file)
        require_new(form.files(place), force)  # again: a file that has appeared meanwhile is somebody's
        if len(written) > 1:
            place.unlink(missing_ok=True)
        for file, target in zip(written, form.files(place)):
            os.replace(file, target)
    except OSError as error:
        raise UserError(f"cannot write {place}: {error.strerror or in_a_line(error, 200)}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
