"""The formats: what they need, their files, how a captured program is written, and how its metadata are read back."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ..errors import UserError, import_extra, in_a_line, nearest
from .capture import Captured, quiet

__all__ = ["FORMATS", "Format", "format_named", "format_of", "read_metadata", "why_not_written"]

KEY = "stepsnet"  # of the metadata, in each format
_TORCH_FILE = f"{KEY}.json"
_ONNX_LIMIT = 2**31 - 2**20  # bytes of a protocol buffer file, less room for all but the weights
_OPERATOR = re.compile(r"\b(?:aten|torchvision|prims|quantized)(?:\.|::)\w+(?:\.\w+)?")

Write = Callable[[Captured, Sequence[str], str, Path], None]


@dataclass(frozen=True)
class Format:
    """A format of exported models."""

    name: str
    suffix: str
    runtime: str  # what runs it, by its name for ``stepsnet bench --runtime``
    packages: tuple[str, ...]  # those of the extra that are imported
    write: Write  # takes the program, the outputs' names, the metadata as JSON and the path with its suffix
    read: Callable[[Path], str | None]  # gives the metadata
    beside: tuple[str, ...] = ()  # suffixes of further files, which are put in place before the one that is opened

    def require(self) -> None:
        """Raises UserError that says what to install, if a package is missing."""
        for package in self.packages:
            import_extra(package)

    def files(self, path: Path) -> list[Path]:
        """The files of a model; the one that users open comes last."""
        return [*(path.with_suffix(suffix) for suffix in self.beside), path]


def format_named(name: str) -> Format:
    """Raises UserError for an unknown format."""
    if name not in FORMATS:
        raise UserError(f"--format: got {name!r}, expected one of {', '.join(FORMATS)}{nearest(name, FORMATS)}")
    return FORMATS[name]


def format_of(path: Path) -> Format:
    """The format of a file, by its suffix. Raises UserError if no format has that suffix."""
    for one in FORMATS.values():
        if path.suffix == one.suffix:
            return one
    known = ", ".join(one.suffix for one in FORMATS.values())
    raise UserError(f"export: got {path}, expected a file that ends in one of {known}")


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Read the metadata that :func:`stepsnet.export` has written into a file: inputs, outputs, preprocessing, classes.

    Raises:
        UserError: the file is not one of stepsnet's, or a package that reads it is not installed.
    """
    path = Path(path)
    form = format_of(path)
    form.require()
    if not path.is_file():
        raise UserError(f"export: {path} does not exist")
    try:
        text = form.read(path)
        return json.loads(text or "")
    except Exception as error:  # whatever three libraries and json raise
        said = in_a_line(error, 200, with_type=True)
        raise UserError(f"export: {path} was not written by stepsnet, or is damaged: {said}") from None


def _write_onnx(captured: Captured, outputs: Sequence[str], metadata: str, path: Path) -> None:
    weights = [*captured.program.state_dict.values(), *captured.program.constants.values()]
    size = sum(value.nbytes for value in weights if isinstance(value, torch.Tensor))
    if size > _ONNX_LIMIT:
        raise UserError(f"the weights take {size / 2**30:.1f} GiB, expected at most the 2 GiB of one ONNX file")
    # no gradients, as at capture: with them, attention whose mask is a parameter takes a path with other strides
    with torch.no_grad(), quiet():
        program: Any = torch.onnx.export(
            captured.program, dynamo=True, input_names=[captured.input], output_names=list(outputs), verbose=False
        )
    _name_axes(program.model, captured)
    program.model.producer_name = KEY
    program.model.metadata_props[KEY] = metadata
    program.save(str(path), external_data=False)


def _name_axes(model: Any, captured: Captured) -> None:
    """Call axes ``batch`` and the like instead of torch's ``s77``, for people who look at the model."""
    import onnx_ir

    names = {
        str(dimension.value): name
        for dimension, name in zip(model.graph.inputs[0].shape, captured.input_shape)
        if isinstance(name, str)
    }
    values = [*model.graph.inputs, *(value for node in model.graph for value in node.outputs)]
    for value in values:
        for axis, dimension in enumerate(value.shape or ()):
            if isinstance(dimension, onnx_ir.SymbolicDim) and dimension.value is not None:
                renamed = re.sub(r"\w+", lambda found: names.get(found[0], found[0]), str(dimension.value))
                value.shape[axis] = onnx_ir.SymbolicDim(renamed)


def _read_onnx(path: Path) -> str | None:
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    return next((entry.value for entry in model.metadata_props if entry.key == KEY), None)


def _write_torch(captured: Captured, outputs: Sequence[str], metadata: str, path: Path) -> None:
    torch.export.save(captured.program, str(path), extra_files={_TORCH_FILE: metadata})


def _read_torch(path: Path) -> str | None:
    """Read the metadata without ``torch.export.load``, which runs what is pickled in the file."""
    with zipfile.ZipFile(path) as archive:
        name = next((name for name in archive.namelist() if name.endswith(f"/extra/{_TORCH_FILE}")), None)
        return None if name is None else archive.read(name).decode()


def _write_openvino(captured: Captured, outputs: Sequence[str], metadata: str, path: Path) -> None:
    import openvino
    from openvino.frontend.pytorch import ConversionExtension

    with quiet(), without_telemetry():
        resize = ConversionExtension("aten._upsample_bicubic2d_aa.default", _resized)
        model = openvino.convert_model(captured.program, extension=[resize])
    model.inputs[0].set_names({captured.input})
    for output, name in zip(model.outputs, outputs):
        output.set_names({name})
    shape = [-1 if isinstance(size, str) else size for size in captured.input_shape]
    model.reshape({captured.input: openvino.PartialShape(shape)})
    model.set_rt_info(metadata, [KEY])
    openvino.save_model(model, str(path), compress_to_fp16=False)


def _resized(context: Any) -> Any:
    """Position embeddings at another picture size: torch's antialiased bicubic resize, which the converter lacks."""
    import openvino.opset14 as ops

    x, size = context.get_input(0), ops.convert(context.get_input(1), "i64")
    axes = ops.constant([2, 3], dtype="int64")
    return ops.interpolate(x, size, "bicubic_pillow", "sizes", cube_coeff=-0.5, axes=axes).outputs()


def _read_openvino(path: Path) -> str | None:
    import openvino

    return openvino.Core().read_model(str(path)).get_rt_info([KEY]).astype(str)


@contextmanager
def without_telemetry() -> Iterator[None]:
    """Keep OpenVINO's converter from reporting its use to its makers, even if the user has not turned that off."""
    try:
        import openvino_telemetry
    except ImportError:
        stub: Any = nullcontext()
    else:
        from openvino.tools.ovc.telemetry_stub import Telemetry

        stub = mock.patch.object(openvino_telemetry, "Telemetry", Telemetry)
    with stub:
        yield


def why_not_written(form: Format, error: Exception) -> str:
    """One line about an exporter's exception: the operators that it names, or else how its message begins."""
    if isinstance(error, UserError):
        return str(error)
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < 5:
        chain.append(str(cause))
        cause = cause.__cause__
    operators = list(dict.fromkeys(name.removesuffix(".default") for name in _OPERATOR.findall(" ".join(chain))))[:3]
    return f"it has no operator for {', '.join(operators)}" if operators else in_a_line(error, 200, with_type=True)


FORMATS = {
    one.name: one
    for one in (
        Format("onnx", ".onnx", "onnxruntime", ("onnx", "onnxscript", "onnxruntime"), _write_onnx, _read_onnx),
        Format("torch", ".pt2", "torch", (), _write_torch, _read_torch),
        Format("openvino", ".xml", "openvino", ("openvino",), _write_openvino, _read_openvino, (".bin",)),
    )
}
