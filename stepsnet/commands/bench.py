"""`stepsnet bench`: speed and memory of any models side by side, and the figures of Fig. 6."""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..markdown import markdown_table
from ..summary_stats import format_number, format_quartiles
from ..terminal import say
from .options import integers, whole

if TYPE_CHECKING:
    from ..config import ModelSpec

__all__ = ["bench", "find_candidates", "render_bench", "write_bench"]

HELP = "measure the speed and memory of models side by side (Fig. 6)"
TOKENS = 128  # of a language model's samples, where it has positions for so many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="+",
        help="a timm or StepsNet name, table:5b for a table's rows, a run folder or its summary.json",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="where speed.json and the figures are written")
    parser.add_argument("--force", action="store_true", help="replace earlier results in --out")
    parser.add_argument("--batch-size", type=whole(1), default=32, help="samples per forward pass (default: 32)")
    parser.add_argument("--rounds", type=whole(1), default=10, help="timings of each model (default: 10)")
    parser.add_argument(
        "--memory", metavar="B,B", type=integers, default=[32, 64], help="two batch sizes (default: 32,64); 0 is none"
    )
    parser.add_argument("--no-train", action="store_true", help="inference only")
    parser.add_argument("--device", default="auto", help="cpu, cuda, … (default: an accelerator if there is one)")
    parser.add_argument("--amp-dtype", default="float32", help="float32, bfloat16 or float16 (default: float32)")
    parser.add_argument("--compile", action="store_true", help="as stepsnet.optimize compiles them")
    parser.add_argument(
        "--runtime",
        metavar="R,R",
        default="torch",
        help="torch, onnxruntime and openvino, side by side in inference (default: torch)",
    )
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> None:
    from ..console import Lines

    memory = tuple(options.memory) if any(options.memory) else None
    if memory and (len(memory) != 2 or not 0 < memory[0] < memory[1]):
        given = ",".join(map(str, memory))
        raise UserError(f"--memory: got {given}, expected two batch sizes that increase, such as 32,64, or 0")
    names = ("batch_size", "rounds", "device", "amp_dtype", "compile")
    settings = {name: getattr(options, name) for name in names}
    if options.out:
        from ..files import require_folder, require_new
        from ..report.speed import FILES

        require_folder(options.out, "--out")
        require_new([options.out / name for name in ("speed.json", *FILES)], options.force)
    candidates = find_candidates(options.models)
    so_far: list[dict[str, Any]] = []

    def keep(found: dict[str, Any]) -> None:
        so_far[:] = [found]
        if options.out:
            _keep(options.out, found)

    def show(found: dict[str, Any]) -> None:
        say(json.dumps(found) if options.json else render_bench(found))

    try:
        with Lines(sys.stderr) as lines:

            def note(text: str) -> None:
                for kind in ("note", "phase"):  # said at once, and again where it takes long
                    lines.show({"run": "bench", "kind": kind, "text": text})

            result = bench(
                candidates,
                memory_batches=memory,
                train=not options.no_train,
                runtimes=options.runtime.split(","),
                note=note,
                keep=keep,
                **settings,
            )
    except UserError:  # such as a memory that does not suffice, once the speed is measured
        for found in so_far:
            show(found)
        raise
    try:
        if options.out:
            write_bench(result, options.out)
    finally:  # what took so long is shown where it cannot be written, and written where it cannot be shown
        show(result)


@dataclass(frozen=True)
class Candidate:
    name: str
    curve: str  # the curve that it is a point of, in figures
    spec: ModelSpec
    accuracy: float | None = None  # %
    accuracy_of: str = ""


def find_candidates(names: Sequence[str]) -> list[Candidate]:
    """Models by name, the rows of the paper's tables as ``table:5b``, and runs by their folder or ``summary.json``.

    Raises:
        UserError: a name that is none of these, a run without a summary, or a name twice.
    """
    from ..config import ModelSpec

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
    from ..config import ModelSpec
    from ..paper.tables import model_of, printed_rows

    found = []
    for row in printed_rows(table):
        name, arguments = model_of(row) or ("", {})
        title = row["row"]
        curve = title.rsplit(" ", 2)[0] if title.endswith("blocks") else title.rsplit("-", 1)[0]
        found.append(Candidate(title, curve, ModelSpec(name, arguments), row.get("top1"), "as the paper prints it"))
    return found


def _of_run(path: Path) -> Candidate:
    from ..config import ModelSpec

    file = path / "summary.json" if path.is_dir() else path
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        spec = ModelSpec(**summary["model"])
        accuracy = summary["metrics"].get("val_top1")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"bench: {file} is not the summary of a run ({type(error).__name__}: {error})") from None
    _import_modules_of(summary, file)
    name = path.name if path.is_dir() else f"{path.parent.name}/{path.stem}"
    return Candidate(name, summary.get("label", name), spec, accuracy, "of the run" if accuracy is not None else "")


def _import_modules_of(summary: dict[str, Any], file: Path) -> None:
    """Those that register the model of a run; its config.yaml says where they were."""
    from ..overrides import read_recipe
    from ..user_modules import import_user_modules

    if (config := file.with_name("config.yaml")).exists() and summary.get("import"):
        read_recipe(config)
    else:
        import_user_modules(summary.get("import", ()))


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
        memory_batches: the two batch sizes between which memory a sample is taken; None leaves memory out.
        runtimes: "torch", "onnxruntime" and "openvino", each a row of its own. With another than torch, inference
            alone is measured, without memory.
        keep: called with what there is so far once the speed is measured, and after the memory of each model.

    Returns:
        What ``speed.json`` holds: settings, where it was measured, and a row a model: samples/s of inference and
        training, latency in ms, bytes; medians and quartiles over the rounds, and the seconds of each round.

    Raises:
        UserError: a number out of range, a model that cannot be built, or what does not fit into memory.
    """
    from ..analysis.complexity import count_complexity, count_language_model
    from ..analysis.speed import Measured, measure_memory, measure_speed
    from ..device import pick_device
    from ..models.blocks import is_of_transformers
    from ..models.build import DETECTORS, build_model, context_of, input_size_of
    from ..models.optimize import optimize
    from ..provenance import provenance
    from ..summary_stats import quartiles

    for name, value in (("batch-size", batch_size), ("rounds", rounds)):
        if value < 1:
            raise UserError(f"--{name}: got {value}, expected at least 1")
    where, measured = pick_device(device), []
    rows: list[dict[str, Any]] = []
    if compile and "torch" not in runtimes:
        raise UserError(f"--compile: got it with the runtime {', '.join(runtimes)}, expected torch among them")
    if others := _other_runtimes(runtimes, where, amp_dtype):
        train, memory_batches = False, None
    for candidate in candidates:
        if candidate.spec.name in DETECTORS:
            raise UserError(f"bench: got {candidate.name}, a detector, expected a classifier or a language model")
        model: Any = build_model(candidate.spec)
        vocabulary: int | None = None
        if is_of_transformers(model):
            tokens = min(TOKENS, context_of(model.config) or TOKENS)
            shape: tuple[int, ...] = (tokens,)
            vocabulary = model.config.vocab_size
            counts = count_language_model(model, tokens)
        else:
            shape = input_size_of(candidate.spec, model)
            counts = count_complexity(model, shape)
        of_inference = None
        in_runtimes: dict[str, Any] = {}
        for runtime in others:
            from ..deploy.as_module import in_runtime

            note(f"exporting {candidate.name} for {runtime}")
            in_runtimes[f", {runtime}"] = in_runtime(candidate.spec, model, runtime, where, amp_dtype)
        if "torch" in runtimes:
            if compile:
                of_inference = optimize(copy.deepcopy(model).to(where), "inference")
                if train:
                    optimize(model.to(where), "training")  # where it is decides how
            in_runtimes = {", torch" if others else "": model, **in_runtimes}
        for suffix, module in in_runtimes.items():
            optimized = of_inference if module is model else None
            measured.append(Measured(candidate.name + suffix, module, shape, vocabulary, optimized))
            named = {"model": candidate.name + suffix, "curve": candidate.curve + suffix, "shape": list(shape)}
            accuracy = {"accuracy": candidate.accuracy, "accuracy_of": candidate.accuracy_of}
            rows.append({**named, **vars(counts), **accuracy})
    seconds = measure_speed(measured, batch_size, rounds, where, amp_dtype, train, note)
    settings: dict[str, Any] = {"batch_size": batch_size, "rounds": rounds, "amp_dtype": amp_dtype, "compile": compile}
    if others:
        settings["runtimes"] = list(runtimes)
    result = {"device": str(where), **settings, "rows": rows, **provenance()}
    for row, one in zip(rows, measured):
        timed = seconds[one.name]
        row["latency_ms"] = quartiles([1000 * value for value in timed["latency"]])
        for kind in ("inference", "training"):
            if kind in timed:
                row[kind] = quartiles([batch_size / value for value in timed[kind]])
        row["seconds"] = timed
    keep(result)
    if memory_batches:
        for row, one in zip(rows, measured):
            note(f"memory of {one.name}")
            row["memory"] = measure_memory(one, memory_batches, where, amp_dtype, train)
            keep(result)
    return result


def _other_runtimes(runtimes: Sequence[str], device: Any, amp_dtype: str) -> list[str]:
    """Those besides torch. Raises UserError for one that is unknown, given twice, or not to be had here."""
    if twice := next((name for name in runtimes if list(runtimes).count(name) > 1), None):
        raise UserError(f"--runtime: got {twice} twice, expected each runtime once")
    others = [name for name in runtimes if name != "torch"]
    if others:
        from ..deploy.sessions import check_runtime

        for name in others:
            check_runtime(name, device, amp_dtype)
    return others


def _keep(out: Path, result: dict[str, Any]) -> None:
    """Write what has been measured by now: the next model may not fit into memory. Figures of other numbers go."""
    from ..files import write_atomically
    from ..report.speed import FILES

    for name in FILES:
        (out / name).unlink(missing_ok=True)
    write_atomically(out / "speed.json", json.dumps(result, indent=1) + "\n")


def write_bench(result: dict[str, Any], out: Path) -> None:
    """Write ``speed.json`` and the figures, with their numbers as CSV, in ``out``."""
    from ..report.speed import draw_speed

    _keep(out, result)
    draw_speed(result, out)


def render_bench(result: dict[str, Any]) -> str:
    """As a Markdown table: medians, and the first and third quartile behind them."""
    rows = result["rows"]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "blocks": lambda row: str(row["blocks"] or "—"),
        "MACs (G)": lambda row: format_number(row["macs"] / 1e9),
        "inference /s": lambda row: format_quartiles(row["inference"], None),
    }
    if "training" in rows[0]:
        columns["training /s"] = lambda row: format_quartiles(row["training"], None)
    columns["latency (ms)"] = lambda row: format_quartiles(row["latency_ms"], None)
    for kind in rows[0].get("memory", {}):  # of the first models alone, where it did not suffice for the next
        columns[f"{kind} MiB per sample"] = partial(_memory, kind)
    cells = [[row["model"], *(show(row) for show in columns.values())] for row in rows]
    return markdown_table(["model", *columns], cells, "l" + "r" * len(columns))


def _memory(kind: str, row: dict[str, Any]) -> str:
    return f"{row['memory'][kind]['per_sample'] / 2**20:,.1f}" if "memory" in row else "—"
