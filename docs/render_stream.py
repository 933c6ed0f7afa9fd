"""Tables and figures of what studies recorded about the residual stream: Fig. 2 of tuned networks, over their seeds."""

from __future__ import annotations

import statistics

from matplotlib import colormaps
from render_parts import FIGURES, read_study, table_of_numbers

from stepsnet.output.summary_stats import format_mean_std
from stepsnet.report.figure import in_style, make_panels
from stepsnet.study.declare import Study
from stepsnet.study.run_plan import a_final, recipe_of
from stepsnet.study.verdict import finals_of

Curves = dict[int, list[list[float]]]  # by update: for each seed, a value after each block


def stream_table(name: str, *cells: str) -> str:
    """γ after the last block by update, and the gradients at the end: mean ± deviation over the final runs of cells."""
    study, results = read_study(name)
    rows = []
    for cell in cells:
        finals = _measured(study, cell, results)
        gamma, gradient = _recorded(finals, "gamma"), _recorded(finals, "gradient")
        at_end = [of_seed[0] / of_seed[-1] for of_seed in gradient[max(gradient)]]
        widths = recipe_of(study, a_final(study, study.cell(cell, "stream"), "")).model.args["widths"]
        per_channel = [ratio * (widths[-1] / widths[0]) ** 0.5 for ratio in at_end]  # norms over what a block reads
        gradients = [format_mean_std(ratios, ".1f") for ratios in (at_end, per_channel)]
        after_last = [format_mean_std([of_seed[-1] for of_seed in of_seeds], ".2f") for of_seeds in gamma.values()]
        rows.append([_label(study, cell), str(len(finals)), *after_last, *gradients])
    headers = ["", "seeds", *(f"γ, update {update:,}" for update in gamma)]
    headers += ["gradient, first / last block", "per channel"]
    return f"{table_of_numbers(headers, rows)}\n\n{_figure_line(study)}"


def stream_figure(name: str, *cells: str) -> None:
    """Draw γ after each block, one panel per cell and one curve per update, as in Fig. 2; bands span the seeds.

    Dotted curves are γ of the part that is read, if that is less than the whole stream.
    """
    study, results = read_study(name)
    with in_style():
        figure, axes = make_panels(False, len(cells), 2, 2.4, sharex=True, sharey=True)
        highest, handles = 1.0, {}
        for ax, cell in zip(axes, cells):
            finals = _measured(study, cell, results)
            whole, read = _recorded(finals, "gamma"), _recorded(finals, "gamma_read")
            for place, (update, of_seeds) in enumerate(whole.items()):
                color = colormaps["viridis_r"](0.12 + 0.88 * place / max(1, len(whole) - 1))
                depth = [block / len(of_seeds[0]) for block in range(len(of_seeds[0]) + 1)]
                low, mean, high = ([1, *map(of, zip(*of_seeds))] for of in (min, statistics.fmean, max))
                ax.fill_between(depth, low, high, color=color, alpha=0.2, linewidth=0)
                (handles[f"update {update:,}"],) = ax.plot(depth, mean, color=color, linewidth=1.5)
                if read[update] != of_seeds:
                    ax.plot(depth, [1, *map(statistics.fmean, zip(*read[update]))], ":", color=color, linewidth=1)
                highest = max(highest, *high)
            ax.set(xlabel="depth (0: input, 1: output)", ylabel="shortcut ratio γ", title=_label(study, cell))
        axes[0].set(xlim=(0, 1), ylim=(0, 1.05 * highest))
        figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=len(handles))
        figure.savefig(FIGURES / f"{study.folder}-shortcut.png", dpi=150)


def _measured(study: Study, cell: str, results) -> dict:
    """The final runs of a cell, without those that diverged, which record no stream."""
    finals = finals_of(study, study.cell(cell, "stream"), results)
    measured = {seed: record for seed, record in finals.items() if record.get("stream")}
    if not measured:
        raise ValueError(f"{cell} of {study.name} has no final run with a stream, expected one")
    return measured


def _recorded(finals, quantity: str) -> Curves:
    """A quantity at the updates at which all of the final runs have been measured."""
    of_runs = [{line["step"]: line[quantity] for line in record["stream"]} for record in finals.values()]
    return {update: [run[update] for run in of_runs] for update in sorted(set.intersection(*map(set, of_runs)))}


def _label(study: Study, cell: str) -> str:
    name, _, point = cell.partition("@")
    return f"{study.contender(name).label or name}, {point} {study.point}"


def _figure_line(study: Study) -> str:
    return f"![Shortcut ratio γ by depth over the training, a panel a network](figures/{study.folder}-shortcut.png)"
