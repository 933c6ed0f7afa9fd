"""Tables of what the benchmarks of speed measured: of models, of settings, of designs, and of imports."""

from __future__ import annotations

import re

from render_parts import origin, read_benchmark, table_of_numbers

from stepsnet.output.markdown import markdown_table
from stepsnet.output.summary_stats import format_quartiles


def optimized_table(name: str) -> str:
    """Each model as built and as `stepsnet.optimize` makes it, and the pairs' ratios."""
    result = read_benchmark(name)
    inference = any(row["kind"] == "inference" for row in result["rows"])
    headers = ["", "", "per second", "over as built"]
    if inference:
        headers += ["share of the matrix rate", "difference of outputs", "seconds to prepare"]
    rows = []
    for row in result["rows"]:
        for model in row["models"]:
            for setting, found in model["settings"].items():
                cells = [format_quartiles(found["per_second"]), format_quartiles(found["speed_over_as_built"])]
                if "share_of_the_matrix_rate" in found:
                    cells.append(format_quartiles(found["share_of_the_matrix_rate"]))
                    cells += [f"{found['relative_error']:.0e}", f"{found['seconds_to_prepare']:.0f}"]
                elif inference:
                    cells += [""] * 3
                rows.append([f"{short(model['model'])}, {row['kind']}", setting, *cells])
        for setting, ratio in row["speed_over_baseline"].items():
            names = " / ".join(short(model["model"]) for model in row["models"])
            blank = [""] * (len(headers) - 3)
            rows.append([f"{names}, {row['kind']}", setting, format_quartiles(ratio), *blank])
    rates = ", ".join(f"{row['gflops_of_a_product']['median']:.0f}" for row in result["rows"])
    note = (
        f"Batches of {result['batch_size']}, {result['amp_dtype']}, {result['rounds']} interleaved rounds, median "
        f"(quartiles); GFLOP/s of a product of two float32 matrices of 1024×1024 in the rounds of each pair: {rates}. "
        f"{origin(result)}"
    )
    return f"{table_of_numbers(headers, rows)}\n\n{note}"


def pairs_table() -> str:
    """The speed of each StepsNet over its baseline's, each at its best setting; the details are in the other tables."""
    columns = {
        "inference": "optimized_2_threads",
        "training": "optimized_training",
        "inference, bfloat16": "optimized_bfloat16",
        "training, bfloat16": "optimized_bfloat16_training",
    }
    pairs: dict[str, list[str]] = {}
    for benchmark in columns.values():
        for row in read_benchmark(benchmark)["rows"]:
            names = " / ".join(short(model["model"]) for model in row["models"])
            pairs.setdefault(names, []).append(format_quartiles(row["speed_over_baseline"]["each at its best"]))
    return table_of_numbers(["speed", *columns], [[names, *cells] for names, cells in pairs.items()])


def candidates_table() -> str:
    """What helps on its own, and what does not."""
    result = read_benchmark("candidates")
    rows = [
        [row["candidate"], format_quartiles(row["speed_over_without"]), "yes" if row["kept"] else "no"]
        for row in result["rows"]
    ]
    headers = ["inference, one thread, float32 where nothing else is said", "speed over without", "in `optimize`"]
    note = f"{result['rounds']} interleaved rounds, median (quartiles). {origin(result)}"
    return f"{table_of_numbers(headers, rows)}\n\n{note}"


def device_pairs_table(name: str) -> str:
    """On a GPU: the speed of each StepsNet over its baseline's, each at its best setting, and both as built."""
    result = read_benchmark(name)
    table = []
    for pair in result["pairs"].values():
        built = {(row["kind"], row["batch_size"]): row for row in measured(pair) if row["setting"] == "eager"}
        for (kind, batch), row in built.items():
            best = pair["best"][f"{kind} {batch}"]
            cells = [f"{best['speed_over_baseline']:.2f}", *(best[contender][1] for contender in ("steps", "baseline"))]
            peaks = [f"{ours / theirs:.2f}" for ours, theirs in [row["peak_bytes"]]] if "peak_bytes" in row else [""]
            names = " / ".join(short(model) for model in pair["models"])
            table.append([f"{names}, {kind}", batch, format_quartiles(row["speed_over_baseline"]), *cells, *peaks])
    headers = ["speed over the baseline", "batch", "as built", "each at its best", "its best", "the baseline's"]
    return table_of_numbers([*headers, "peak memory as built"], table)


def device_table(name: str) -> str:
    """On a GPU: each pair under each setting that was measured."""
    result = read_benchmark(name)
    table = [
        [
            f"{' / '.join(short(model) for model in pair['models'])}, {row['kind']}",
            row["batch_size"],
            row["setting"],
            *(f"{row[f'{contender}_per_second']['median']:,.0f}" for contender in ("steps", "baseline")),
            format_quartiles(row["speed_over_baseline"]),
        ]
        for pair in result["pairs"].values()
        for row in measured(pair)
    ]
    headers = ["", "batch", "setting", "StepsNet /s", "baseline /s", "speed over the baseline"]
    note = (
        f"{result['rounds']} interleaved rounds, medians (quartiles of the ratio). Inference with weights in bfloat16, "
        f"training under bfloat16 autocast. A sample of a language model has 512 tokens. {origin(result)}"
    )
    return f"{table_of_numbers(headers, table)}\n\n{note}"


def device_tests_table(*names: str) -> str:
    """How the tests on a GPU ended, one row per run of them."""
    rows, notes = [], []
    for number, name in enumerate(names, 1):
        result = read_benchmark(name)
        outcomes = result["outcomes"]
        failed = [f"`{test}`: {_why(outcome)}" for test, outcome in outcomes.items() if outcome != "passed"]
        passed = f"{len(outcomes) - len(failed)} of {len(outcomes)}"
        rows.append([number, result["hardware"]["gpu"], passed, result["seconds"], "; ".join(failed)])
        notes.append(f"{number}. {origin(result)}")
    headers = ["run", "GPU", "passed", "seconds", "the others"]
    return "\n".join([markdown_table(headers, rows, "llrrl"), "", *notes])


def _why(outcome: str) -> str:
    """What a failed test said, or that it failed."""
    return outcome.partition(": ")[2] or outcome


def designs_table(name: str) -> str:
    """The time of each design of the stream over that of the plain one."""
    result = read_benchmark(name)
    columns = [key for key in result["rows"][0] if key != "design"]
    rows = []
    for row in result["rows"]:
        design = row["design"] if row["design"] == "StepsNet" else f"`{row['design']}`"
        rows.append([design, *(format_quartiles(row[key]["time_over_plain"]) for key in columns)])
    note = (
        f"{result['rounds']} interleaved rounds, median (quartiles); {result['blocks']} blocks, "
        f"{result['width']} wide, in batches of {result['batch_size']} images of 224×224. {origin(result)}"
    )
    table = table_of_numbers(["time over plain's", *columns], rows)
    return f"{table}\n\n{note}"


def measured(pair: dict) -> list[dict]:
    """The rows of a pair's measurements that did not fail."""
    return [row for row in pair["rows"] if "error" not in row]


def short(model: str) -> str:
    """A model's name without its table and the suffix that all models of its kind have."""
    return re.sub(r"(_patch\d+)?(_window7)?_224$", "", model.split("/")[-1])


def imports_table() -> str:
    """What the package adds to timm's import."""
    result = read_benchmark("imports")
    rows = [
        ["`import timm, stepsnet` over `import timm`", format_quartiles(result["import_over_timm"])],
        ["`import timm`, seconds", format_quartiles(result["seconds_of_timm"])],
        ["`stepsnet --help`, seconds", format_quartiles(result["seconds_of_help"])],
    ]
    return f"{table_of_numbers(['processor time', 'median (quartiles)'], rows)}\n\n{origin(result)}"


def bounds_table() -> str:
    """Shares of time by kind of operator, the largest first."""
    result = read_benchmark("bounds")
    kinds = sorted(
        {kind for row in result["operators"] for kind in row["shares"]},
        key=lambda kind: -max(row["shares"].get(kind, {"median": 0})["median"] for row in result["operators"]),
    )
    rows = []
    for row in result["operators"]:
        shares = [f"{100 * row['shares'][kind]['median']:.0f}%" if kind in row["shares"] else "" for kind in kinds]
        rows.append([short(row["model"]), *shares])
    headers = ["share of the time", *kinds]
    small = ("norms", "additions and scales")
    sums = [
        f"{100 * sum(row['shares'][kind]['median'] for kind in small):.1f}% of {short(row['model'])}"
        for row in result["operators"]
        if short(row["model"]).startswith("steps_deit")
    ]
    note = f"Norms, additions and scales together: {', '.join(sums)}. "
    note += f"Inference as built, batches of {result['batch_size']}, median of {result['rounds']} rounds."
    return f"{table_of_numbers(headers, rows)}\n\n{note} {origin(result)}"


def overheads_table() -> str:
    """What the macro design adds to its blocks, and what depth adds to compilation."""
    result = read_benchmark("bounds")
    rows = []
    for row in result["macro_design"]:
        for kind, found in row["time_over_blocks_alone"].items():
            rows.append([f"{short(row['model'])}, {kind}: the StepsNet over its blocks alone", format_quartiles(found)])
    (compiled,) = result["compilation"]
    for row in compiled["rows"]:
        what = f"first call of {row['layers']} layers of {row['widths']} widths, compiled by the block, seconds"
        rows.append([f"{what}; {row['graphs']} graphs", format_quartiles(row["seconds"])])
    rows.append(["482 over 22 layers", format_quartiles(compiled["time_of_482_over_22_layers"])])
    return f"{table_of_numbers(['processor time', 'median (quartiles)'], rows)}\n\n{origin(result)}"
