"""Speed and memory of models side by side, in torch and in other runtimes, as ``stepsnet bench`` measures them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .analysis.complexity import count_complexity, count_language_model
from .analysis.speed import Measured, measure_memory, measure_speed
from .deploy.as_module import in_runtime
from .deploy.sessions import check_runtime
from .device import pick_device
from .errors import UserError
from .files.writing import dump_json, write_atomically
from .models.blocks import is_in_steps, is_of_transformers
from .models.build import DETECTORS, build_model, context_of, input_size_of
from .models.optimize import optimize
from .output.markdown import markdown_table
from .output.summary_stats import format_number, format_quartiles, quartiles
from .paper.tables import model_of, printed_rows
from .report.speed import FILES, draw_speed
from .run_folder.folder import has_begun, read_run_recipe, refuse_several
from .run_folder.provenance import provenance
from .settings.config import ModelSpec
from .settings.consent import fetched_by, is_of_weights
from .settings.user_modules import import_user_modules

__all__ = ["Candidate", "bench", "find_candidates", "keep_bench", "render_bench", "write_bench"]

TOKENS = 128  # in a sample for a language model, if it has positions for that many


@dataclass(frozen=True)
class Candidate:
    name: str
    curve: str  # the curve on which it is a point, in figures
    spec: ModelSpec
    accuracy: float | None = None  # %
    accuracy_of: str = ""
    side: int | None = None  # of its images in pixels, if its arguments do not give it

    @property
    def of_inputs(self) -> ModelSpec:
        """The spec with the size of its inputs, an argument that only some models are built with."""
        sized = {} if self.side is None else {"img_size": self.side}
        return ModelSpec(self.spec.name, {**sized, **self.spec.args})


def find_candidates(names: Sequence[str]) -> list[Candidate]:
    """Find models by name, the rows of the paper's tables as ``table:5b``, and runs by folder or ``summary.json``.

    A name that is neither a table's nor a run's is taken for that of a model, and looked up when the model is built.

    Raises:
        UserError: an unknown table, a run without a summary, the same name twice, or a run whose model is fetched from
            the network and has not been asked for.
    """
    found: list[Candidate] = []
    for text in names:
        path = Path(text)
        if text.startswith("table:"):
            found += _of_table(text.removeprefix("table:"))
        elif path.is_dir() or path.suffix == ".json":
            found.append(_of_run(path))
        else:
            found.append(Candidate(text, text, ModelSpec(text)))
    given = [candidate.name for candidate in found]
    if twice := next((name for name in given if given.count(name) > 1), None):
        raise UserError(f"bench: got {twice} twice, expected each model once")
    return found


def _of_table(table: str) -> list[Candidate]:
    found = []
    for row in printed_rows(table):
        name, arguments = model_of(row) or ("", {})
        title = row["row"]
        curve = re.sub(r"( \d+ blocks|-[A-Z]|-\d+M?| \d+M)$", "", title)  # without its size
        found.append(Candidate(title, curve, ModelSpec(name, arguments), row.get("top1"), "as the paper prints it"))
    return found


def _of_run(path: Path) -> Candidate:
    refuse_several(path)
    file = path / "summary.json" if path.is_dir() else path
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        spec = ModelSpec(**summary["model"])
        accuracy = summary["metrics"].get("val_top1")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"bench: {file} is not the summary of a run ({type(error).__name__}: {error})") from None
    name = path.name if path.is_dir() else f"{path.parent.name}/{path.stem}"
    of_run = "of the run" if accuracy is not None else ""
    return Candidate(name, summary.get("label", name), spec, accuracy, of_run, _side_of_run(summary, file))


def _side_of_run(summary: dict[str, Any], file: Path) -> int | None:
    """The side of a run's images, if its recipe is there to say it; imports the modules that register its model."""
    if has_begun(file.parent):
        recipe: Any = read_run_recipe(file.parent)
        side = getattr(recipe, "crop_size", getattr(recipe, "img_size", None))
        return side if isinstance(side, int) else None
    if fetched := [value for key, value in fetched_by({"model": summary["model"]}).items() if not is_of_weights(key)]:
        raise UserError(
            f"bench: {file}: its model {fetched[0]!r} is fetched from the network, expected the folder of its run, or "
            "the name of the model itself"
        )
    import_user_modules(summary.get("import", ()))
    return None


def bench(
    candidates: Sequence[Candidate],
    *,
    batch_size: int = 32,
    rounds: int = 10,
    memory_batches: tuple[int, int] | None = (32, 64),
    train: bool = True,
    device: str = "auto",
    amp_dtype: str = "float32",
    compile: bool = False,
    runtimes: Sequence[str] = ("torch",),
    note: Callable[[str], None] = lambda text: None,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Measure speed and memory.

    Args:
        memory_batches: the two batch sizes whose difference gives the memory per sample; None leaves memory out.
        runtimes: "torch", "onnxruntime" and "openvino", each in a row of its own. With any other than torch, only
            inference is measured, and no memory.
        keep: called with the results so far once the speed has been measured, and after the memory of each model.

    Returns:
        The content of ``speed.json``: settings, what was measured on, and a row for each model: samples/s of inference
        and training, latency in ms, bytes; medians and quartiles over the rounds, and the seconds of each round.

    Raises:
        UserError: a number is out of range, a model cannot be built, or something does not fit into memory.
    """
    for name, value in (("batch-size", batch_size), ("rounds", rounds)):
        if value < 1:
            raise UserError(f"--{name}: got {value}, expected at least 1")
    where = pick_device(device)
    if compile and "torch" not in runtimes:
        raise UserError(f"--compile: got it with --runtime {','.join(runtimes)}, expected torch among the runtimes")
    if others := _other_runtimes(runtimes, where, amp_dtype):
        train, memory_batches = False, None
    rows: list[dict[str, Any]] = []
    measured: list[Measured] = []
    for candidate in candidates:
        if candidate.spec.name in DETECTORS:
            raise UserError(f"bench: got {candidate.name}, a detector, expected a classifier or a language model")
        model = build_model(candidate.spec, pretrained=False)
        sample, counts = _sample_and_counts(candidate.of_inputs, model)
        accuracy = {"accuracy": candidate.accuracy, "accuracy_of": candidate.accuracy_of}
        of_model = {"in_steps": is_in_steps(model), "shape": list(sample["shape"]), **counts, **accuracy}
        if "torch" in runtimes:
            optimized = _optimized(model, where, train) if compile else None
            suffix = ", torch" if others else ""
            measured.append(Measured(candidate.name + suffix, model, **sample, optimized=optimized))
            rows.append({"model": candidate.name + suffix, "curve": candidate.curve + suffix, **of_model})
        for runtime in others:
            note(f"exporting {candidate.name} for {runtime}")
            module = in_runtime(candidate.of_inputs, model, runtime, where, amp_dtype)
            measured.append(Measured(f"{candidate.name}, {runtime}", module, **sample))
            rows.append({"model": measured[-1].name, "curve": f"{candidate.curve}, {runtime}", **of_model})
    settings: dict[str, Any] = {"batch_size": batch_size, "rounds": rounds, "amp_dtype": amp_dtype, "compile": compile}
    if others:
        settings["runtimes"] = list(runtimes)
    result = {"device": str(where), **settings, "rows": rows, **provenance(where)}
    seconds = measure_speed(measured, batch_size, rounds, where, amp_dtype, train, note)
    for row in rows:
        row |= _speed(seconds[row["model"]], batch_size)
    keep(result)
    if memory_batches:
        for row, one in zip(rows, measured):
            note(f"memory of {one.name}")
            row["memory"] = measure_memory(one, memory_batches, where, amp_dtype, train)
            keep(result)
    return result


def _sample_and_counts(spec: ModelSpec, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a model is measured on, as arguments of Measured, and its blocks, layers, parameters and MACs."""
    if is_of_transformers(model):
        tokens = min(TOKENS, context_of(model) or TOKENS)
        of_token = count_language_model(model, tokens)
        counts = vars(of_token) | {"macs": tokens * of_token.macs}  # per sample, as the speed is
        return {"shape": (tokens,), "vocabulary": model.config.vocab_size}, counts
    shape = input_size_of(spec, model)
    return {"shape": shape}, vars(count_complexity(model, shape))


def _optimized(model: Any, device: torch.device, train: bool) -> Any:
    """A copy of the model, optimized for inference; with ``train``, the model itself is optimized for training."""
    of_inference = optimize(copy.deepcopy(model).to(device), "inference")
    if train:
        optimize(model.to(device), "training")  # its device decides how
    return of_inference


def _speed(seconds: Mapping[str, Sequence[float]], batch_size: int) -> dict[str, Any]:
    """The speed of one model, from the seconds of each round."""
    speed: dict[str, Any] = {"latency_ms": quartiles([1000 * value for value in seconds["latency"]])}
    for kind in ("inference", "training"):
        if kind in seconds:
            speed[kind] = quartiles([batch_size / value for value in seconds[kind]])
    return {**speed, "seconds": seconds}


def _other_runtimes(runtimes: Sequence[str], device: Any, amp_dtype: str) -> list[str]:
    """The runtimes besides torch. Raises UserError for one that is unknown, given twice, or unavailable here."""
    if twice := next((name for name in runtimes if list(runtimes).count(name) > 1), None):
        raise UserError(f"--runtime: got {twice} twice, expected each runtime once")
    others = [name for name in runtimes if name != "torch"]
    for name in others:
        check_runtime(name, device, amp_dtype)
    return others


def keep_bench(out: Path, result: dict[str, Any]) -> None:
    """Write what has been measured so far, since the next model may not fit into memory, and remove older figures."""
    for name in FILES:
        (out / name).unlink(missing_ok=True)
    write_atomically(out / "speed.json", dump_json(result, indent=1) + "\n")


def write_bench(result: dict[str, Any], out: Path) -> None:
    """Write ``speed.json`` and the figures, with their numbers as CSV, in ``out``."""
    keep_bench(out, result)
    draw_speed(result, out)


def render_bench(result: dict[str, Any]) -> str:
    """Return a Markdown table of medians, each followed by the first and third quartile."""
    rows = result["rows"]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "blocks": lambda row: str(row["blocks"] or "—"),
        "MACs (G)": lambda row: format_number(row["macs"] / 1e9),
        "inference /s": lambda row: format_quartiles(row["inference"], None),
    }
    if "training" in rows[0]:
        columns["training /s"] = lambda row: format_quartiles(row["training"], None)
    columns["latency (ms)"] = lambda row: format_quartiles(row["latency_ms"], None)
    for kind in rows[0].get("memory", {}):  # if memory ran out, only the first models have it
        columns[f"{kind} MiB per sample"] = partial(_memory, kind)
    cells = [[row["model"], *(show(row) for show in columns.values())] for row in rows]
    return markdown_table(["model", *columns], cells, "l" + "r" * len(columns))


def _memory(kind: str, row: dict[str, Any]) -> str:
    return f"{row['memory'][kind]['per_sample'] / 2**20:,.1f}" if "memory" in row else "—"
