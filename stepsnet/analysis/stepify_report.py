"""What a model costs before and after :func:`stepsnet.stepify`, and how strong the stream is where it begins."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import in_a_line
from ..macs import OF_MODULES
from ..models.blocks import blocks_of, is_of_transformers, is_transformer_in_steps, step_sequences
from ..models.stepify import model_and_example, stages_in_steps, stepify
from ..models.stepify.example import Example
from ..output.markdown import markdown_table
from ..plan import steps_as_text
from .complexity import count_layers
from .memory import peak_bytes, sum_of_outputs

__all__ = ["StepifyReport", "Stream", "describe_stepify"]

_SAMPLES = 32  # the most samples of an example that a stream is measured on
_RANDOM = 4  # random samples in its place, enough for the statistics of batch norms
SMALL = 0.1  # trained blocks add about 1, whatever untrained ones add


@dataclass(frozen=True)
class Cost:
    """What a model costs for one sample, or for a whole example that cannot be split into samples.

    ``activation_bytes`` is the peak of a forward and backward pass in float32; None if these cannot run without values.
    """

    blocks: int
    layers: int
    params: int
    macs: int
    activation_bytes: int | None


@dataclass(frozen=True)
class Stage:
    """A container of blocks and the steps that take its place."""

    path: str
    block: str
    width: int
    depth: int
    widths: tuple[int, ...]
    depths: tuple[int, ...]

    def __str__(self) -> str:
        steps = steps_as_text(zip(self.widths, self.depths))
        return f"{self.path or 'model'} ({self.block}): {self.width}×{self.depth} -> {steps}"


@dataclass(frozen=True)
class Stream:
    """Standard deviations over channels at the start of an untrained stream, on the example or on random inputs.

    ``sigma`` is that of what enters the stream, after its ``stream_scale``, and ``branch`` that of what the first block
    adds.
    """

    path: str
    sigma: float
    branch: float
    passes: int = 1  # how often the model runs these blocks; the first time counts
    stream_scale: float = 1.0

    @property
    def is_small(self) -> bool:
        return self.sigma < max(SMALL, self.branch)

    @property
    def suggested_scale(self) -> float | None:
        """A ``stream_scale`` that brings sigma to 1, if the stream is small and its blocks run only once."""
        is_asked = self.is_small and self.sigma > 0 and self.passes == 1
        return float(f"{self.stream_scale / self.sigma:.2g}") if is_asked else None


@dataclass(frozen=True)
class StepifyReport:
    """Printed, it is a table; ``as_dict`` is for JSON.

    ``notes`` name the design if there is one, and say what the costs are of if that is not one sample, and why a stream
    was not measured. ``stages_in_steps`` are the numbers of the stages in steps if the model has other stages too, else
    None.
    """

    model: str
    before: Cost
    after: Cost
    stages: tuple[Stage, ...]
    streams: tuple[Stream, ...]
    notes: tuple[str, ...] = ()
    stages_in_steps: tuple[int, ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        streams = [{**asdict(one), "suggested_scale": one.suggested_scale} for one in self.streams]
        return {**asdict(self), "streams": streams}

    def __str__(self) -> str:
        sizes = [asdict(self.before), asdict(self.after)]
        rows = [
            [
                name,
                *(_readable(field, size[field]) for size in sizes),
                f"{sizes[1][field] / max(1, sizes[0][field]):.2f}×",
            ]
            for name, field in _ROWS.items()
            if None not in (sizes[0][field], sizes[1][field])
        ]
        table = markdown_table([self.model, "before", "in steps", "ratio"], rows, "lrrr")
        lines = [*map(str, self.stages), "", table, "", *self.notes]
        same = "" if self.stages_in_steps is None else f" and stages={list(self.stages_in_steps)}"
        for one in self.streams:
            place = f" of {one.path}" if one.path and len(self.streams) > 1 else ""
            lines.append(f"stream{place}: it begins with sigma {one.sigma:.2g}, its first block adds {one.branch:.2g}")
            if one.suggested_scale is not None:
                lines.append(
                    "    That is small: channels that wait are drowned out by what the blocks add. "
                    f"stream_scale={one.suggested_scale:g} brings it to 1; give the original the same scale, "
                    f"with steps=1{same} (docs/your-model.md)."
                )
        return "\n".join(lines)


_ROWS = {
    "blocks": "blocks",
    "layers": "layers",
    "params (M)": "params",
    "MACs (G)": "macs",
    "activations (MiB)": "activation_bytes",
}


def _readable(field: str, value: int) -> str:
    unit = {"params": 1e6, "macs": 1e9, "activation_bytes": 2**20}.get(field)
    return str(value) if unit is None else f"{value / unit:.3f}" if value >= 0.1 * unit else f"{value / unit:.3g}"


def describe_stepify(model: nn.Module | str, steps: int = 3, **options: Any) -> StepifyReport:
    """Describe what :func:`stepsnet.stepify` makes of a model with the same arguments, before anything is trained.

    Random weights are drawn with seed 0, and torch's own generators are left as they are. The stream is measured on the
    ``example`` if it has values; one that is meta, constant or not finite only stands for its shape. With a design, the
    stream is that of the same steps without it.

    Raises:
        UserError: as stepify.
    """
    with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        torch.manual_seed(0)
        plain, example, options = model_and_example(model, options)
        generator, design = torch.get_rng_state(), options.get("residual", "plain")
        stepped = in_plain_steps = stepify(plain, steps, **options)
        if design != "plain":
            torch.set_rng_state(generator)
            in_plain_steps = stepify(plain, steps, **options | {"residual": "plain", "residual_options": None})
    name = model if isinstance(model, str) else type(model).__name__
    before, after = (
        _cost(plain, example, _count_blocks(plain, stepped)),
        _cost(stepped, example, len(blocks_of(stepped))),
    )
    notes = []
    if design != "plain":
        chosen = "".join(f", {key}={value}" for key, value in (options.get("residual_options") or {}).items())
        notes.append(f"design of each stream: {design}{chosen}")
    if (rows := _rows(example)) > 1:
        notes.append(
            f"MACs and activations are those of the whole example: its first dimension, {rows}, does not count samples"
        )
    try:
        streams = _streams(in_plain_steps, example)
    except OF_MODULES as error:
        streams = ()
        notes.append(f"stream: not measured, since {type(plain).__name__} does not run ({in_a_line(error)[:200]})")
    numbers = stages_in_steps(plain, steps, **options)
    stages = None if numbers is None else tuple(numbers)
    return StepifyReport(name, before, after, _stages(plain, stepped), streams, tuple(notes), stages)


def _rows(example: Example) -> int:
    """The length of the first tensor that a model is called with; more than 1 if its rows are not samples."""
    values = (*example.args, *(example.kwargs or {}).values())
    return next((len(value) for value in values if isinstance(value, Tensor) and value.dim()), 1)


def _count_blocks(plain: nn.Module, stepped: nn.Module) -> int:
    """The number of blocks in the containers that stepify finds; similar modules elsewhere, such as heads, are none."""
    if is_of_transformers(plain):
        return len(blocks_of(plain))
    before, paths = dict(plain.named_modules()), {module: path for path, module in stepped.named_modules()}
    return sum(len(list(before[paths[sequence]].children())) for sequence in step_sequences(stepped))


def _cost(model: nn.Module, example: Example, blocks: int) -> Cost:
    return Cost(
        blocks=blocks,
        layers=count_layers(model),
        params=sum(parameter.numel() for parameter in model.parameters()),
        macs=example.macs(model),
        activation_bytes=_activation_bytes(model, example),
    )


def _activation_bytes(model: nn.Module, example: Example) -> int | None:
    """The peak bytes, or None. Batch norms use running statistics if there is only one value per channel."""
    call = (example.args, example.kwargs or {})
    for prepare in (lambda model: None, lambda model: _set_batch_norms(model, training=False)):
        try:
            return peak_bytes(model, call, lambda model, call: sum_of_outputs(model(*call[0], **call[1])), prepare)
        except OF_MODULES:
            continue
    return None


def _set_batch_norms(model: nn.Module, training: bool) -> None:
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.train(training)


def _stages(plain: nn.Module, stepped: Any) -> tuple[Stage, ...]:
    if is_transformer_in_steps(stepped):
        layers = blocks_of(plain)
        names = [path for path, module in plain.named_modules() if module is layers[0]]
        path, block = names[0].rpartition(".")[0], type(layers[0]).__name__
        config = stepped.config
        return (Stage(path, block, config.hidden_size, len(layers), tuple(config.widths), tuple(config.depths)),)
    paths = {module: path for path, module in stepped.named_modules()}
    before = dict(plain.named_modules())
    found = []
    for sequence in step_sequences(stepped):
        originals = list(before[paths[sequence]].children())
        if len(sequence.widths) > 1:
            depth = len(originals) - sequence.lead
            block = type(originals[-1]).__name__
            depths = tuple(getattr(sequence, "depths", ()))
            found.append(Stage(paths[sequence], block, sequence.width, depth, sequence.widths, depths))
    return tuple(found)


@torch.no_grad()
def _streams(model: Any, example: Example) -> tuple[Stream, ...]:
    """Measure the streams on the example or on random samples, in a model that is discarded afterwards."""
    device = next(model.parameters()).device
    if device.type == "meta":
        return ()
    model.eval()
    _set_batch_norms(model, training=True)  # their running statistics are not those of any data yet
    begins = _first_blocks(model)
    found: dict[str, Stream] = {}

    def note(path: str, dim: int, scale: float):
        def hook(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if path in found:
                found[path] = replace(found[path], passes=found[path].passes + 1)
                return
            width = getattr(block, "read_width", args[0].shape[dim])
            before = args[0] * getattr(block, "stream_scale", 1.0)  # a layer of transformers applies it itself
            after = output[0] if isinstance(output, tuple) else output
            added = (after - before).narrow(dim, 0, width)
            sigma = _sigma(before.narrow(dim, 0, width), dim)
            found[path] = Stream(path, sigma, _sigma(added, dim), stream_scale=scale)

        return hook

    args, kwargs = _batch(model, example)
    with ExitStack() as stack:
        for path, (block, dim, scale) in begins.items():
            stack.callback(block.register_forward_hook(note(path, dim, scale)).remove)
        try:
            model(*args, **kwargs)
        except ValueError:  # one value per channel, as with one row
            found.clear()
            _set_batch_norms(model, training=False)
            model(*args, **kwargs)
    return tuple(found.values())


def _first_blocks(model: Any) -> dict[str, tuple[nn.Module, int, float]]:
    """The first block of each stream of several steps, with its dim and stream_scale, by the path of its container."""
    if is_transformer_in_steps(model):
        first: Any = blocks_of(model)[0]
        return {"": (first, -1, getattr(first, "stream_scale", 1.0))}
    paths = {module: path for path, module in model.named_modules()}
    streams = [one for one in step_sequences(model) if len(one.widths) > 1]
    return {paths[one]: (list(one)[one.lead].block, one.dim, one.stream_scale) for one in streams}


def _batch(model: Any, example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the stream is measured on: the given example (its first samples, if it has several) or random numbers."""
    args, kwargs = example.given or (example.args, example.kwargs or {})
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    numbers = [value for value in tensors if value.is_floating_point()]
    has_values = not numbers or any(map(_has_values, numbers))
    rows = next((len(value) for value in tensors if value.dim()), 1)
    parameter, generator = next(model.parameters()), torch.Generator().manual_seed(0)

    def taken(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_batch = _rows(example) == 1 and value.dim() > 0 and len(value) == rows
        if value.is_floating_point() and not has_values:
            shape = (_RANDOM, *value.shape[1:]) if is_batch else value.shape
            return torch.randn(shape, generator=generator).to(parameter)
        if value.device.type == "meta":  # of transformers, see below
            return value
        if is_batch:
            value = value[:_SAMPLES] if has_values else value[torch.arange(_RANDOM) % rows]
        return value.to(parameter) if value.is_floating_point() else value.to(parameter.device)

    kwargs = {name: taken(value) for name, value in kwargs.items()}
    if "input_ids" in kwargs and kwargs["input_ids"].device.type == "meta":
        ids = torch.randint(model.config.vocab_size, (_RANDOM, kwargs["input_ids"].shape[1]), generator=generator)
        kwargs["input_ids"] = ids.to(parameter.device)
        kwargs.pop("attention_mask", None)
    return tuple(map(taken, args)), kwargs


def _has_values(value: Tensor) -> bool:
    """Whether a tensor of numbers holds real data; zeros, ones and what torch.empty finds only stand for a shape."""
    if value.is_meta or not value.numel():
        return False
    return bool(value.isfinite().all()) and bool((value != value.flatten()[0]).any())


def _sigma(z: Tensor, dim: int) -> float:
    return z.float().std(dim).mean().item()
