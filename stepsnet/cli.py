"""The command line: verbs to functions, and nothing else.

Nothing heavy is imported before a verb needs it, so that ``stepsnet --help`` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from . import __version__
from .errors import UserError, nearest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 for bad input, 130 or 143 for a signal."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(options, "overrides") or any(argument.startswith("-") for argument in rest)):
        parser.error(f"got {' '.join(rest)}, expected none of it")
    if rest:
        options.overrides += rest  # argparse takes no positional arguments after an option's
    try:
        return options.verb(options) or 0
    except UserError as error:
        if options.debug:
            raise
        print(f"stepsnet: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stepsnet: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return 141
    except Exception as error:
        status = getattr(error, "status", None)  # a run that a signal stopped
        if status is None or options.debug:
            raise
        print(f"stepsnet: {error}", file=sys.stderr)
        return status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="stepsnet", description="Step by Step Network: very deep networks that train.")
    parser.add_argument("--version", action="version", version=f"stepsnet {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def verb(name: str, function, text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        sub.set_defaults(verb=function)
        return sub

    sub = verb("train", _train, "train a recipe, or continue a run")
    sub.add_argument("recipe", metavar="RECIPE", help="a name from `stepsnet recipes`, or a .yaml file")
    _add_run_options(sub)
    sub.add_argument("--label", default="", help=argparse.SUPPRESS)

    sub = verb("compare", _compare, "train a StepsNet and its baseline under one recipe, side by side")
    sub.add_argument("recipe", metavar="RECIPE", help="a name from `stepsnet recipes`, or a .yaml file")
    _add_run_options(sub)
    sub.add_argument("--seeds", metavar="S,S,…", type=_numbers, help="a pair of runs for each seed")
    sub.add_argument("--jobs", type=int, default=2, help="runs at once, which share the cores (default: 2)")

    sub = verb("sweep", _sweep, "run a declared study, or train a grid of recipes and seeds (Fig. 1)")
    sub.add_argument(
        "patterns",
        metavar="STUDY|RECIPE",
        nargs="*",
        help="a study's name or .yaml file, or recipes such as 'digits/steps_*'; without any, the studies are listed",
    )
    _add_run_options(sub)
    sub.add_argument("--seeds", metavar="S,S,…", type=_numbers, help="of recipes: each with each (default: 0)")
    sub.add_argument("--jobs", type=int, default=2, help="runs at once, which share the cores (default: 2)")
    sub.add_argument("--results", metavar="DIR", type=Path, help="of a study: a JSON for each run (default: in --run)")
    sub.add_argument("--render", action="store_true", help="of a study: train nothing, render what is in --results")

    sub = verb("eval", _eval, "score a run, or a checkpoint of any timm or StepsNet model, on a validation split")
    sub.add_argument("run", metavar="RUN", type=Path, help="a run folder, or with --model a file of weights")
    sub.add_argument("overrides", metavar="key=value", nargs="*", help="how it is scored, such as eval_flip=true")
    sub.add_argument("--data", help="other data than the run's, such as folder:PATH")
    sub.add_argument("--model", metavar="NAME", help="the model that a file of weights is of")
    sub.add_argument("--stride", type=int, help="of a language model: tokens scored in each window")
    sub.add_argument("--json", action="store_true")

    sub = verb(
        "predict", _predict, "print the likeliest classes of pictures, draw what is in them, or go on with a text"
    )
    sub.add_argument("run", metavar="RUN", type=Path)
    sub.add_argument("files", metavar="FILE", nargs="*", help="a picture, a folder or a pattern")
    sub.add_argument("--prompt", help="the text that a language model goes on with")
    sub.add_argument("--tokens", type=int, default=200, help="how many it writes at most (default: 200)")
    sub.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    sub.add_argument("--seed", type=int, default=0, help="of what it draws (default: 0)")
    sub.add_argument("--top", type=int, default=5, help="classes a picture (default: 5)")
    sub.add_argument("--out", metavar="DIR", type=Path, default=Path("predictions"), help="for pictures that are drawn")
    sub.add_argument("--least", type=float, default=0.5, help="score from which an object is drawn (default: 0.5)")
    sub.add_argument("--json", action="store_true")

    sub = verb("analyze", _analyze, "look inside trained networks: Fig. 2, Table 6 and Table 7 of your own runs")
    sub.add_argument(
        "kind",
        choices=("shortcut", "mask", "drop"),
        help="what the residual stream carries by depth; or score a run without channels of a path, or without blocks",
    )
    sub.add_argument("runs", metavar="RUN", nargs="+", type=Path)
    sub.add_argument("--out", metavar="DIR", type=Path, default=Path("analysis"), help="for the pictures of shortcut")
    sub.add_argument("--each", action="store_true", help="with drop: each single block in turn")
    sub.add_argument("--data", help="other data than the run's, such as folder:PATH")
    sub.add_argument("--json", action="store_true")

    sub = verb("bench", _bench, "measure the speed and memory of models side by side (Fig. 6)")
    sub.add_argument(
        "models",
        metavar="MODEL",
        nargs="+",
        help="a timm or StepsNet name, table:5b for a table's rows, a run folder or its summary.json",
    )
    sub.add_argument("--out", metavar="DIR", type=Path, default=Path("speed"), help="for speed.json and the pictures")
    sub.add_argument("--batch-size", type=int, default=32, help="samples a forward pass (default: 32)")
    sub.add_argument("--rounds", type=int, default=10, help="timings of each model (default: 10)")
    sub.add_argument(
        "--memory", metavar="B,B", type=_numbers, default=[32, 64], help="two batch sizes (default: 32,64); 0 is none"
    )
    sub.add_argument("--no-train", action="store_true", help="inference only")
    sub.add_argument("--device", default="auto", help="cpu, cuda, … (default: an accelerator if there is one)")
    sub.add_argument("--amp-dtype", default="float32", help="float32, bfloat16 or float16 (default: float32)")
    sub.add_argument("--compile", action="store_true", help="with torch.compile, one block at a time")
    sub.add_argument("--json", action="store_true")

    sub = verb("report", _report, "write one HTML page for any runs, finished or not")
    sub.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folders, or that of a comparison")
    sub.add_argument("--out", metavar="FILE", type=Path, default=Path("report.html"), help="default: report.html")
    sub.add_argument("--title", help="default: the names of the recipes")

    sub = verb("models", _models, "list the models, their baselines and sizes")
    sub.add_argument("--json", action="store_true")

    sub = verb("recipes", _recipes, "list the recipes")
    sub.add_argument("--json", action="store_true")

    sub = verb("plan", _plan, "plan the widths and depths of a StepsNet")
    sub.add_argument("--width", type=int, help="width of the residual network")
    sub.add_argument("--depth", type=int, help="its number of blocks")
    sub.add_argument("--steps", type=int, default=3, help="number of widths (default: 3)")
    sub.add_argument("--blocks", type=int, help="total number of blocks to reach at the same compute")
    sub.add_argument("--gmacs", type=float, help="compute of all blocks, in 10⁹ multiply-accumulates")
    sub.add_argument("--head-dim", type=int, default=64, help="attention head size to stay near to (default: 64)")
    sub.add_argument("--round-to", default="heads", help="'heads' as the paper, or a multiple such as 8 or 64")
    sub.add_argument("--tokens", type=int, default=197, help="sequence length (default: 197, DeiT at 224)")
    sub.add_argument("--memory", action="store_true", help="predict what training takes on each device instead")
    sub.add_argument("--model", metavar="NAME", help="with --memory: a timm or StepsNet model")
    sub.add_argument("--batch-size", type=int, default=1024, help="samples an update, over all devices (default: 1024)")
    sub.add_argument("--devices", type=int, default=1, help="devices that share the batch (default: 1)")
    sub.add_argument("--accumulation-steps", type=int, default=1, help="parts that each goes through (default: 1)")
    sub.add_argument("--shard", action="store_true", help="show FSDP, which divides the weights too, beside DDP")
    sub.add_argument("--average", action="store_true", help="with an average of the weights (ema_decay)")
    sub.add_argument("--grad-checkpointing", type=float, default=0.0, help="share of the blocks that is recomputed")
    sub.add_argument("--amp-dtype", default="float32", help="float32, bfloat16 or float16 (default: float32)")
    sub.add_argument("--json", action="store_true")

    sub = verb("table", _table, "hold a table of the paper against our models")
    sub.add_argument("table", metavar="TABLE", help="1, 2a, 2b, 3, 4, 5a, 5b, 8, 9, 10 or 11")
    sub.add_argument("--json", action="store_true")
    return parser


def _add_run_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("overrides", metavar="key=value", nargs="*", help="changes to the recipe, such as epochs=3")
    sub.add_argument("--data", help="where the data are: a folder, or KIND:PLACE such as cifar10:PATH, hfds:NAME")
    sub.add_argument("--run", metavar="DIR", type=Path, help="the run folder (default: runs/ and the recipe's name)")
    sub.add_argument("--resume", action="store_true", help="continue the run in that folder from its newest checkpoint")
    sub.add_argument("--progress", choices=("auto", "bars", "lines", "events"), default="auto", help=argparse.SUPPRESS)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected whole numbers such as 0,1,2") from None


def _recipe_and_folder(options: argparse.Namespace):
    from .recipes import find_recipe
    from .recipes.recipe import override, read_recipe

    is_file = options.recipe.endswith((".yaml", ".yml"))
    recipe = read_recipe(Path(options.recipe)) if is_file else find_recipe(options.recipe)
    if options.data:
        recipe = dataclasses.replace(recipe, data=options.data)
    recipe = override(recipe, options.overrides)
    return recipe, options.run or Path("runs") / recipe.name.replace("/", "-")


def _train(options: argparse.Namespace) -> None:
    recipe, folder = _recipe_and_folder(options)
    from .engine.console import SPLITS, choose_display, measure_of
    from .run import train_run

    with choose_display(options.progress) as display:
        summary = train_run(recipe, folder, display, options.resume, options.label)
    if summary and options.progress != "events":
        parts = {split: measure_of(summary["metrics"], f"{key}_") for key, split in SPLITS.items()}
        said = ", ".join(f"{split} {measure}" for split, measure in parts.items() if measure)
        print(f"report: {folder / 'report.html'} — after {summary['epochs']} epochs: {said}")


def _compare(options: argparse.Namespace) -> None:
    recipe, folder = _recipe_and_folder(options)
    from .compare import compare
    from .engine.console import choose_display, measure_of

    seeds = options.seeds or [recipe.seed]
    with choose_display(options.progress) as display:
        summary = compare(recipe, folder, seeds, options.jobs, display, options.resume)
    said = []
    for name in ("StepsNet", "baseline"):
        means = {key: value["mean"] for key, value in summary[name].items()}
        said.append(f"{name} {measure_of(means, 'val_')}")
    print(
        f"report: {folder / 'report.html'} — validation after {recipe.epochs} epochs"
        f"{f', mean of {len(seeds)} seeds' if len(seeds) > 1 else ''}: {', '.join(said)}"
    )


def _sweep(options: argparse.Namespace) -> None:
    from fnmatch import fnmatchcase

    from .recipes import find_recipe, recipes
    from .recipes.recipe import override

    patterns = [text for text in options.patterns if "=" not in text]
    overrides = [text for text in options.patterns if "=" in text] + options.overrides
    from .study.declare import find_study, studies

    if not patterns:
        print("\n".join(studies()))
        return
    if study := find_study(patterns[0]):
        from .study.command import run_study

        return run_study(study, patterns[1:], overrides, options)
    if options.results or options.render:
        raise UserError(f"sweep: got {patterns[0]}, expected a study for --results{nearest(patterns[0], studies())}")
    names = [name for name in recipes() if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = [*studies(), *recipes()]
            raise UserError(f"sweep: got {pattern!r}, expected a study or recipes{nearest(pattern, known)}")
    chosen = [find_recipe(name) for name in names]
    if options.data:
        chosen = [dataclasses.replace(recipe, data=options.data) for recipe in chosen]
    chosen = [override(recipe, overrides) for recipe in chosen]
    folder = options.run or Path("runs") / "sweep"
    from .engine.console import choose_display
    from .sweep import sweep

    with choose_display(options.progress) as display:
        rows = sweep(chosen, folder, options.seeds or [0], options.jobs, display, options.resume)
    print(f"report: {folder / 'report.html'} — {len(rows)} runs of {len(chosen)} recipes")


def _eval(options: argparse.Namespace) -> None:
    from .run import evaluate_checkpoint, evaluate_run

    if options.model and not options.data:
        raise UserError("eval: --model needs --data, expected such as --data folder:PATH")
    if options.model:
        metrics = evaluate_checkpoint(options.run, options.model, options.data)
    else:
        metrics = evaluate_run(options.run, options.data, options.stride, options.overrides)
    if options.json:
        print(json.dumps(metrics))
    else:
        in_percent = ("top1", "top5", "miou", "macc", "pixel_accuracy")
        percent = {name for name in metrics if name in in_percent or "_ap" in name}
        said = (f"{name.replace('_', ' ')} {value:.4g}{'%' * (name in percent)}" for name, value in metrics.items())
        print(", ".join(said))


def _predict(options: argparse.Namespace) -> None:
    from .predict import DRAWN, classify, draw, write
    from .run import recipe_of

    if (options.prompt is None) == (not options.files):
        raise UserError("predict: expected pictures, or --prompt for a language model")
    if options.prompt is not None:
        emit = partial(print, end="", flush=True)
        write(options.run, options.prompt, emit, options.tokens, options.temperature, options.seed)
        print()
        return
    if recipe_of(options.run).task in DRAWN:
        records, lines = draw(options.run, _expand(options.files), options.out, options.least)
        print(json.dumps(records) if options.json else "\n".join(lines))
        return
    predictions = classify(options.run, _expand(options.files), options.top)
    if options.json:
        print(json.dumps([{"file": str(file), "classes": dict(classes)} for file, classes in predictions]))
        return
    for file, classes in predictions:
        print(f"{file}: " + ", ".join(f"{name} {100 * probability:.1f}%" for name, probability in classes))


def _expand(patterns: Sequence[str]) -> list[Path]:
    """Files, the files of folders, and what patterns match."""
    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        matches = sorted(glob.glob(pattern)) if glob.has_magic(pattern) and not path.exists() else [pattern]
        if not matches:
            raise UserError(f"predict: nothing matches {pattern}")
        for match in map(Path, matches):
            inside = sorted(file for file in match.iterdir() if file.is_file()) if match.is_dir() else [match]
            if not inside:
                raise UserError(f"predict: the folder {match} is empty")
            found += inside
    return found


def _analyze(options: argparse.Namespace) -> None:
    from .analyze import analyze_drop, analyze_mask, analyze_shortcut, render_rows

    if options.each and options.kind != "drop":
        raise UserError(f"analyze: got --each with {options.kind}, expected it with drop")
    if options.kind == "shortcut":
        rows = analyze_shortcut(options.runs, options.out, options.data)
    elif options.kind == "mask":
        rows = analyze_mask(options.runs, options.data)
    else:
        rows = analyze_drop(options.runs, options.data, options.each)
    if options.json:
        from .provenance import provenance

        print(json.dumps({"rows": rows, **provenance()}))
    else:
        print(render_rows(rows))


def _bench(options: argparse.Namespace) -> None:
    from .bench import bench, find_candidates, render_bench

    memory = tuple(options.memory) if any(options.memory) else None
    if memory and len(memory) != 2:
        raise UserError(f"--memory: got {','.join(map(str, memory))}, expected two batch sizes such as 32,64, or 0")
    names = ("batch_size", "rounds", "device", "amp_dtype", "compile")
    settings = {name: getattr(options, name) for name in names}
    note = partial(print, file=sys.stderr, flush=True)
    candidates = find_candidates(options.models)
    result = bench(candidates, options.out, memory_batches=memory, train=not options.no_train, note=note, **settings)
    print(json.dumps(result) if options.json else render_bench(result))


def _report(options: argparse.Namespace) -> None:
    from .report import find_runs, write_report

    runs = find_runs(options.runs)
    write_report(runs, options.out, options.title)
    print(f"report: {options.out} — {len(runs)} run{'s' * (len(runs) > 1)}")


def _models(options: argparse.Namespace) -> None:
    import timm
    import torch

    from .analysis.complexity import count_complexity
    from .models import baseline_of, model_names

    rows = []
    for name in model_names():
        with torch.device("meta"):
            counts = count_complexity(timm.create_model(name))
        baseline = baseline_of(name) if name.startswith("steps_") else None
        rows.append({"model": name, "baseline": baseline, **vars(counts)})
    if options.json:
        print(json.dumps(rows))
        return
    print("| model | baseline | blocks | layers | params (M) | MACs (G) |\n|---|---|---:|---:|---:|---:|")
    for row in rows:
        numbers = f"{row['blocks']} | {row['layers']} | {row['params'] / 1e6:.1f} | {row['macs'] / 1e9:.1f}"
        print(f"| {row['model']} | {row['baseline'] or '–'} | {numbers} |")


def _recipes(options: argparse.Namespace) -> None:
    from .recipes import recipes

    listed = {name: (make.__doc__ or "").split("\n")[0] for name, make in recipes().items()}
    if options.json:
        print(json.dumps(listed))
        return
    for name, text in listed.items():
        print(f"{name:<{max(map(len, listed))}} {text}")


def _plan(options: argparse.Namespace) -> None:
    if options.memory and options.model:
        return _plan_memory(options)
    if options.memory or options.model or options.width is None or options.depth is None:
        raise UserError("plan: expected --width and --depth, or --memory and --model")
    from .plan import plan_steps, render_plan

    round_to = options.round_to
    if round_to != "heads":
        if not round_to.isdecimal():
            raise UserError(f"--round-to: got {round_to!r}, expected 'heads' or a positive whole number")
        round_to = int(round_to)
    macs = None if options.gmacs is None else options.gmacs * 1e9
    shared = {"head_dim": options.head_dim, "tokens": options.tokens}
    try:
        base = plan_steps(options.width, options.depth, 1, **shared)
        plan = plan_steps(
            options.width, options.depth, options.steps, blocks=options.blocks, macs=macs, round_to=round_to, **shared
        )
    except ValueError as error:
        raise UserError(f"plan: {error}") from None
    if options.json:
        print(json.dumps({name: p.as_dict(options.tokens) for name, p in (("plan", plan), ("one_step", base))}))
    else:
        print(render_plan(plan, base, options.tokens))


def _plan_memory(options: argparse.Namespace) -> None:
    from .analysis.memory import plan_memory, render_memory

    names = ("batch_size", "devices", "accumulation_steps", "shard", "average", "grad_checkpointing", "amp_dtype")
    plan = plan_memory(options.model, **{name: getattr(options, name) for name in names})
    print(json.dumps(plan) if options.json else render_memory(plan))


def _table(options: argparse.Namespace) -> None:
    from .paper.tables import compare_table, render_table

    compared = compare_table(options.table)
    print(json.dumps(compared, indent=1) if options.json else render_table(options.table, compared))
