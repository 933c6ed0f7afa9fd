"""What a model costs before and after :func:`stepsnet.stepify`, and how strong the stream is where it begins."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..markdown import markdown_table
from ..models.blocks import blocks_of, is_transformer_in_steps, step_sequences
from ..models.stepify import model_and_example, stepify
from ..models.stepify.containers import Example
from ..plan import steps_as_text
from .complexity import count_layers
from .memory import peak_bytes, sum_of_outputs

__all__ = ["StepifyReport", "Stream", "describe_stepify"]

SMALL = 0.1  # blocks that are trained add about 1, whatever an untrained one does


@dataclass(frozen=True)
class Cost:
    """Of one sample; activations are the peak bytes of its forward and backward pass in float32."""

    blocks: int
    layers: int
    params: int
    macs: int
    activation_bytes: int


@dataclass(frozen=True)
class Stage:
    """A container and what takes its place."""

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
    """Standard deviations over channels where a stream begins, untrained, on random inputs.

    ``sigma`` is that of what enters the stream, ``branch`` that of what the first block adds.
    """

    path: str
    sigma: float
    branch: float
    passes: int = 1  # how often the model runs these blocks; the first time counts

    @property
    def is_small(self) -> bool:
        return self.sigma < max(SMALL, self.branch)

    @property
    def suggested_scale(self) -> float | None:
        """A ``stream_scale`` that brings sigma to 1, where the stream is small."""
        return float(f"{1 / self.sigma:.2g}") if self.is_small and self.sigma > 0 and self.passes == 1 else None


@dataclass(frozen=True)
class StepifyReport:
    """Printed, it is a table; ``as_dict`` is for JSON."""

    model: str
    before: Cost
    after: Cost
    stages: tuple[Stage, ...]
    streams: tuple[Stream, ...]

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
        ]
        table = markdown_table([self.model, "before", "in steps", "ratio"], rows, "lrrr")
        lines = [*map(str, self.stages), "", table, ""]
        for one in self.streams:
            place = f" of {one.path}" if one.path and len(self.streams) > 1 else ""
            lines.append(f"stream{place}: it begins with sigma {one.sigma:.2g}, its first block adds {one.branch:.2g}")
            if one.suggested_scale is not None:
                lines.append(
                    f"    That is small: what waits is lost beside what is added. stream_scale={one.suggested_scale:g} "
                    "brings it to 1; give it to the original too, with steps=1 (docs/your-model.md)."
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
    """What :func:`stepsnet.stepify` makes of a model with the same arguments, before anything is trained.

    Random weights are those of seed 0; torch's own generator is left as it is.

    Raises:
        UserError: as stepify.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain, example, options = model_and_example(model, options)
        stepped = stepify(plain, steps, **options)
    name = model if isinstance(model, str) else type(model).__name__
    before, after = _cost(plain, example), _cost(stepped, example)
    return StepifyReport(name, before, after, _stages(plain, stepped), _streams(stepped, example))


def _cost(model: nn.Module, example: Example) -> Cost:
    return Cost(
        blocks=len(blocks_of(model)),
        layers=count_layers(model),
        params=sum(parameter.numel() for parameter in model.parameters()),
        macs=example.macs(model),
        activation_bytes=peak_bytes(
            model,
            (example.args, example.kwargs or {}),
            lambda model, call: sum_of_outputs(model(*call[0], **call[1])),
            lambda model: None,
        ),
    )


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
    """Runs the model, which is thrown away afterwards, on four random samples."""
    device = next(model.parameters()).device
    if device.type == "meta":
        return ()
    model.eval()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.train()  # its statistics are not those of any data yet
    begins = _first_blocks(model)
    found: dict[str, Stream] = {}

    def note(path: str, dim: int):
        def hook(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if path in found:
                found[path] = replace(found[path], passes=found[path].passes + 1)
                return
            width = getattr(block, "read_width", args[0].shape[dim])
            before = args[0] * getattr(block, "stream_scale", 1.0)
            after = output[0] if isinstance(output, tuple) else output
            added = (after - before).narrow(dim, 0, width)
            found[path] = Stream(path, _sigma(before.narrow(dim, 0, width), dim), _sigma(added, dim))

        return hook

    with ExitStack() as stack:
        for path, (block, dim) in begins.items():
            stack.callback(block.register_forward_hook(note(path, dim)).remove)
        args, kwargs = example.given or (example.args, example.kwargs or {})
        rows = next((len(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim()), 1)
        kwargs = {name: _sample(value, rows, model) for name, value in kwargs.items()}
        model(*(_sample(value, rows, model) for value in args), **_random_tokens(model, kwargs, device))
    return tuple(found.values())


def _first_blocks(model: Any) -> dict[str, tuple[nn.Module, int]]:
    """The first block of each stream of several steps, by the path of its container."""
    if is_transformer_in_steps(model):
        return {"": (blocks_of(model)[0], -1)}
    paths = {module: path for path, module in model.named_modules()}
    streams = [one for one in step_sequences(model) if len(one.widths) > 1]
    return {paths[one]: (list(one)[one.lead].block, one.dim) for one in streams}


def _sample(value: Any, rows: int, model: nn.Module) -> Any:
    """Four samples of an argument: random numbers, or of what is no real number, such as token ids, the given ones."""
    if not isinstance(value, Tensor):
        return value
    parameter, is_batch = next(model.parameters()), value.dim() > 0 and len(value) == rows
    if value.is_floating_point():
        shape = (4, *value.shape[1:]) if is_batch else value.shape
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(parameter)
    if value.device.type == "meta":  # of transformers, which _random_tokens has
        return value
    return (value[torch.arange(4) % rows] if is_batch else value).to(parameter.device)


def _random_tokens(model: Any, kwargs: Mapping[str, Any] | None, device: torch.device) -> dict[str, Any]:
    given = dict(kwargs or {})
    if "input_ids" in given:
        shape = (4, given["input_ids"].shape[1])
        ids = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
        given["input_ids"] = ids.to(device)
        given.pop("attention_mask", None)
    return given


def _sigma(z: Tensor, dim: int) -> float:
    return z.float().std(dim).mean().item()
