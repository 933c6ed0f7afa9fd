"""Tables of what ``stepsnet bench`` and the scripts in benchmarks/ measured."""

from __future__ import annotations

import json

from render_parts import RESULTS, has_benchmark, mean_std, origin, read_benchmark, table_of_numbers

from stepsnet.metrics import find_metric
from stepsnet.output.markdown import markdown_table
from stepsnet.output.summary_stats import format_mean_std, format_quartiles, quartiles
from stepsnet.output.terminal import counted


def benchmarks_table() -> str:
    """Median and quartiles of what the engine costs."""
    engine, images, start, checkpoint = map(read_benchmark, ("engine", "images", "start", "checkpoint"))
    bare = f"the bare one of {engine['bare_ms']['median']:.0f} ms"
    rows = [[f"an update in the engine / {bare}", format_quartiles(engine["ratio"], ".3f")]]
    for name, found in images["images_per_second_per_core"].items():
        rows.append([f"images per second on one core, {name}", format_quartiles(found, ".0f")])
    seconds = format_quartiles(start["seconds_to_first_update"], ".1f")
    rows.append([f"seconds to the first update, `{start['recipe']}`", seconds])
    rows.append(["of which a bare `import torch, timm`", format_quartiles(start["seconds_of_imports"], ".1f")])
    size = f"{checkpoint['model']}, {checkpoint['mib']:.0f} MiB"
    for name, what in (("write", "write a checkpoint"), ("load", "load it")):
        ours, theirs = (
            checkpoint[f"{name}_seconds"],
            checkpoint[f"torch_{'save' if name == 'write' else 'load'}_seconds"],
        )
        rows.append([f"seconds to {what}, {size}", format_quartiles(ours)])
        rows.append(["the same by torch alone, without checksum or flush", format_quartiles(theirs)])
    watching = read_benchmark("watching")
    share = 100 * watching["share_of_the_time"]["50"]
    rows.append(["`stream_interval=50`, % of the time of training", f"{share:.1f}"])
    extra = format_quartiles(watching["extra_of_a_watched_update"])
    rows.append(["of which each watched update takes more, as a share", extra])
    table = table_of_numbers(["what", "median (quartiles)"], rows)
    made = (engine, images, start, checkpoint, watching)
    return "\n".join([table, "", *(f"- {origin(result)}" for result in made)])


def stream_blocks_table() -> str:
    """What a loop over the blocks of a StepsNet costs."""
    result = read_benchmark("stream_blocks")
    plan = ", ".join(f"{width}×{depth}" for width, depth in zip(result["plan"]["widths"], result["plan"]["depths"]))
    memory = result["activation_bytes"]
    rows = [
        ["time of a forward and backward pass", format_quartiles(result["loop_over_container"])],
        ["activations", f"{memory['loop'] / memory['container']:.3f}"],
    ]
    headers = [f"{result['model']} in steps, {plan}", "a loop over the blocks / the container"]
    note = f"Batches of {result['batch_size']}, median (quartiles). {origin(result)}"
    return f"{table_of_numbers(headers, rows)}\n\n{note}"


def grow_table() -> str:
    """Grown networks against StepsNets from random weights, at equal total compute."""
    if not has_benchmark("grow"):
        return "The runs of `benchmarks/grow.py` have not ended."
    result = read_benchmark("grow")
    labels = {"before": "the first step alone", "grown": "then grown", "whole": "the whole from random weights"}
    rows, notes = [], []
    titles = (("cifar10", "10,000 images of CIFAR-10", "accuracy"), ("prose", "prose", "loss in nats a token"))
    for name, title, unit in titles:
        if (found := result.get(name)) is None:
            continue
        key = f"test_{found['metric']}"
        for part, label in labels.items():
            row = found["parts"][part]
            compute = f"{row['macs'] * row['samples'] / 1e9:,.0f}"
            rows.append([f"{title}, {label}: {unit}", f"{row['rate']:g}", compute, mean_std(row["test"], key)])
        difference = found["grown_minus_whole"]
        low, high = difference["interval"]
        metric = find_metric(key)
        better = "more" if metric.higher_is_better else "less"
        notes.append(
            f"- {title}, grown minus whole: {difference['mean']:+{metric.spec}}{metric.difference_unit or ' nats'} "
            f"({low:+{metric.spec}} to {high:+{metric.spec}}, the 95% t-interval of the paired differences), at "
            f"{found['compute_of_grown_over_whole']:.3f} of the compute; {better} is better."
        )
    table = table_of_numbers(["", "rate", "GMACs", "on the test split, three seeds"], rows)
    return "\n".join([table, "", *notes, "", origin(result)])


def grow_starts_table() -> str:
    """Ways to begin a grown network."""
    if not has_benchmark("grow_starts"):
        return "The runs of `benchmarks/grow_starts.py` have not ended."
    result = read_benchmark("grow_starts")
    rows = []
    for way, found in result["ways"].items():
        low, high = found["difference"]["interval"]
        difference = "" if way == "stepsnet.grow" else f"{found['difference']['mean']:+.3f} ({low:+.3f} to {high:+.3f})"
        rows.append([f"`{way}`" if way == "stepsnet.grow" else way, format_mean_std(found["loss"], ".3f"), difference])
    headers = ["", "loss, four seeds", "minus that of `stepsnet.grow`, less is better (95% t-interval)"]
    before, after = result["updates"]
    note = f"{before} updates before, {after} after growing. {origin(result)}"
    return f"{table_of_numbers(headers, rows)}\n\n{note}"


def compress_table() -> str:
    """A compressed network against the same one trained from random weights, at equal compute."""
    result = read_benchmark("compress")
    macs, updates, teacher = result["macs"], result["updates"], result["teacher"]
    labels = {
        "greedy": "`stepsnet.compress`",
        "random": "with a random rotation",
        "leading": "without a rotation",
        "scratch": "from random weights, not distilled",
    }
    rows = [["the teacher", "", f"{macs['teacher'] / 1e6:.2f}", "", "", f"{teacher['test']:.1f}%"]]
    for name, label in labels.items():
        found = result["contenders"][name]
        starts = [run["inherited"] for run in found["runs"] if "inherited" in run]
        rows.append(
            [
                label,
                f"{found['lr']:g}",
                f"{macs['student'] / 1e6:.2f}",
                f"{updates['scratch' if name == 'scratch' else 'distilled']:,}",
                f"{sum(starts) / len(starts):.1f}%" if starts else "",
                mean_std([run["test"] for run in found["runs"]], "test_top1"),
            ]
        )
    notes = []
    for pair, (mean, low, high) in result["differences"].items():
        other = labels[pair.removeprefix("greedy - ")]
        notes.append(
            f"- `stepsnet.compress` minus the same {other}: {mean:+.2f} points ({low:+.2f} to {high:+.2f}, the 95% "
            "t-interval of the paired differences)"
        )
    headers = ["", "rate", "MACs (M)", "updates", "before training, held out", "on the test split, three seeds"]
    return "\n".join([table_of_numbers(headers, rows), "", *notes, "", origin(result)])


def language_table(name: str = "language") -> str:
    """A Steps-Transformer's speed in training and generation over LLaMA's, and the cache of each."""
    result = read_benchmark(name)
    headers = ["", "layers", "params", "training speed / baseline", "generation speed / baseline", "cache per token"]
    rows = []
    for row in result["rows"]:
        for name, found in row["models"].items():
            ratios = [format_quartiles(found[f"{kind}_speed_over_baseline"]) for kind in ("train", "generate")]
            ratios = ["1", "1"] if name == "baseline" else ratios
            size = f"{found['cache_bytes_per_token'] / 1024:.1f} KiB"
            baseline = f"LLaMA, width {row['width']}" if "width" in row else f"LLaMA, {row['size']} of Table 4"
            what = {"baseline": baseline, "as deep": "LLaMA, as deep"}.get(name, name)
            rows.append([what, found["layers"], f"{found['params'] / 1e6:.2f}M", *ratios, size])
    return f"{table_of_numbers(headers, rows)}\n\n{origin(result)}"


def memory_table(file: str) -> str:
    """Predicted against measured bytes of benchmarks/memory.py, and where they were measured."""
    result = json.loads((RESULTS / "memory" / file).read_text(encoding="utf-8"))
    headers = ["model", "samples", "`amp_dtype`", "`grad_checkpointing`", "predicted", "measured"]
    headers += ["predicted / measured", "measured, one micro-batch"]
    rows = []

    def mib(size: int) -> str:
        return f"{size / 2**20:.1f} MiB"

    for row in result["rows"]:
        predicted, measured = row["predicted"]["total"], row["measured"]
        settings = [row["model"], row["micro_batch"], row["amp_dtype"], f"{row['grad_checkpointing']:g}"]
        sizes = [mib(predicted), mib(measured["accumulated"]), f"{predicted / measured['accumulated']:.4f}"]
        rows.append([*settings, *sizes, mib(measured["one_micro_batch"])])
    hardware, versions = result["hardware"], result["versions"]
    note = (
        f"`{result['command']}` on {hardware['cpu']}, {hardware['threads']} thread; Python {versions['python']}, "
        f"torch {versions['torch']}, timm {versions['timm']}; commit {result['commit']}."
    )
    return f"{markdown_table(headers, rows, 'lrlrrrrr')}\n\n{note}"


def scale_table(file: str) -> str:
    """Training losses of a StepsNet and its baseline at two scales of the embedding."""
    result = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    updates = ["50", "100", "150", "200", "250"]
    rows = []
    for row in result["rows"]:
        losses = [f"{row['train_loss'][update]:.2f}" for update in updates]
        rows.append([row["label"], f"{row['embedding_scale']:g}", *losses])
    table = table_of_numbers(["", "`embedding_scale`", *(f"update {update}" for update in updates)], rows)
    commits = ", ".join(dict.fromkeys(row["commit"] for row in result["rows"]))
    versions = result["versions"]
    where = f"{result['hardware']['cpu']}, torch {versions['torch']}; {commits}"
    return f"{table}\n\n`{result['command']}`, seed {result['rows'][0]['seed']}, {result['what']}: {where}"


def speed_table(file: str) -> str:
    """What stepsnet bench wrote: medians with quartiles, and each StepsNet over the baseline of the same name."""
    result = json.loads((RESULTS / "speed" / file).read_text(encoding="utf-8"))
    rows = result["rows"]
    kinds = [kind for kind in ("inference", "training") if kind in rows[0]]
    memory = list(rows[0].get("memory", {}))
    heads = [f"{kind} /s" for kind in kinds] + ["latency (ms)"] + [f"{kind}, MiB per sample" for kind in memory]
    table_rows = []
    for row in rows:
        digits = ".2f" if row["inference"]["median"] < 100 else ",.0f"
        cells = [format_quartiles(row[kind], digits) for kind in kinds] + [format_quartiles(row["latency_ms"], ".0f")]
        cells += [f"{row['memory'][kind]['per_sample'] / 2**20:.1f}" for kind in memory]
        table_rows.append([row["model"], row["blocks"], f"{row['macs'] / 1e9:.2f}", *cells])
    for ours, theirs in [(a, b) for a in rows for b in rows if a["curve"] == f"Steps-{b['curve']}"]:
        if ours["model"] == f"Steps-{theirs['model']}":
            cells = [ratio(theirs["seconds"][kind], ours["seconds"][kind]) for kind in kinds]
            cells.append(ratio(ours["seconds"]["latency"], theirs["seconds"]["latency"]))
            cells += [
                f"{ours['memory'][kind]['per_sample'] / theirs['memory'][kind]['per_sample']:.2f}" for kind in memory
            ]
            table_rows.append([f"{ours['model']} / {theirs['model']}", "", "", *cells])
    table = table_of_numbers(["", "blocks", "MACs (G)", *heads], table_rows)
    batch = f"Batches of {result['batch_size']}, {result['amp_dtype']}, {result['rounds']} interleaved rounds"
    return f"{table}\n\n{batch}, median (quartiles). {origin(result)}"


def ratio(over: list[float], under: list[float]) -> str:
    """The ratio of two models' seconds in the same rounds."""
    return format_quartiles(quartiles([a / b for a, b in zip(over, under, strict=True)]))


def detection_table(file: str) -> str:
    """What benchmarks/detection.py measured."""
    result = read_benchmark(file)
    headers = ["", "params"]
    for kind in ("inference", "training"):
        headers += [f"{kind}: images/s", "over Swin-T", "peak MiB"]
    rows = []
    for row in result["rows"]:
        cells = [row["model"], f"{row['parameters'] / 1e6:.1f}M"]
        for kind in ("inference", "training"):
            cells.append(format_quartiles(row[f"{kind}_images_per_second"]))
            cells.append(format_quartiles(row[f"{kind}_speed_over_swin"]))
            cells.append(f"{row[f'{kind}_peak_mib']:.0f}")
        rows.append(cells)
    size = f"{counted(result['batch_size'], 'image')} of {result['size']}×{round(1.6 * result['size'])}"
    what = f"{size}, {result['samples']} boxes trained on and {result['detections']} kept, {result['amp_dtype']}"
    note = f"{what}; median (quartiles), ratios of the same round. {origin(result)}"
    return f"{table_of_numbers(headers, rows)}\n\n{note}"


def segmentation_table() -> str:
    """What benchmarks/segmentation.py measured."""
    result = read_benchmark("segmentation")
    headers = ["", "params", "MACs"]
    for kind in ("inference", "training"):
        headers += [f"{kind}: images/s", "over the baseline", "MiB per image"]
    rows = []
    for name, row in result["models"].items():
        cells = [name, f"{row['params'] / 1e6:.2f}M", f"{row['macs'] / 1e9:.2f}G"]
        for kind in ("inference", "training"):
            cells.append(format_quartiles(row[f"{kind}_images_per_second"], ".1f"))
            cells.append(format_quartiles(row[f"{kind}_speed_over_baseline"]))
            cells.append(f"{row['memory_mib_per_image'][kind]:.1f}")
        rows.append(cells)
    what = f"`{result['recipe']}`, batches of {result['batch_size']} crops of {result['crop_size']}×"
    what += f"{result['crop_size']}, {result['amp_dtype']}"
    note = f"{what}; median (quartiles), ratios of the same round. {origin(result)}"
    return f"{table_of_numbers(headers, rows)}\n\n{note}"
