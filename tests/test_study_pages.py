"""The figure of a study, and `stepsnet sweep STUDY --render`."""

import json
from pathlib import Path

import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from toy_study import declared, records, run

from stepsnet.study.declare import Cell, find_study
from stepsnet.study.render import draw_study
from stepsnet.study.results import read_results

POINTS = {point: {"model.args.depths": [point]} for point in (1, 2, 4)}
FLAT = {"share": 0.5, "within": 0.02}
ALL = [50.0, 51.0, 52.0]


def drawn(tmp_path, *of_points, tuning=None):
    """The first panel of the figure of a contender's records, given by point."""
    changes = {"contenders": [{"name": "plain", "points": POINTS}], "criteria": [], "claims": [], "flatness": FLAT}
    changes |= {"seeds": [1, 2, 3]} | ({"tuning": tuning | {"rates": list(tuning["rates"])}} if tuning else {})
    study = find_study(str(declared(tmp_path, **changes)))
    there = {record["run"]: record for found in of_points for record in found}
    return draw_study(study, there).axes[0]


def hollow(ax):
    """The places of hollow markers, and those of all markers."""
    white = [line for line in ax.lines if to_rgb(line.get_markerfacecolor()) == (1, 1, 1)]
    return {x for line in white for x in line.get_xdata()}, {x for line in ax.lines for x in line.get_xdata()}


def covered(ax):
    """The ranges of points that bands cover, and the points of bars."""
    bands, bars = [], []
    for collection in ax.collections:
        for path in collection.get_paths():
            left, right = path.vertices[:, 0].min(), path.vertices[:, 0].max()
            if isinstance(collection, LineCollection):
                bars.append(left)
            elif left < right:
                bands.append((left, right))
    return sorted(bands), sorted(bars)


def at(point, scores=ALL, **how):
    return list(records(Cell("plain", point), scores, **how))


def test_a_sound_study_has_no_hollow_marker(tmp_path):
    ax = drawn(tmp_path, at(1), at(2), at(4))
    assert hollow(ax) == (set(), {1, 2, 4}) and covered(ax) == ([(1, 4)], [])
    assert ax.get_title(loc="left") == "from the lowest to the highest seed"


@pytest.mark.parametrize(
    ("doubtful", "kind"),
    [
        (at(2, [50.0]), "seeds missing"),
        (at(2, [50.0, 51.0]), "seeds missing"),
        (at(2, moved=0.1), "not converged"),
        ([*at(2)[:-1], at(2)[-1] | {"curve": []}], "convergence unknown"),
        ([*at(2)[:-1], at(2)[-1] | {"metrics": {}, "diverged": "a loss of NaN"}], "seeds diverged"),
    ],
)
def test_a_marker_is_hollow_where_a_cell_is_in_doubt(tmp_path, doubtful, kind):
    ax = drawn(tmp_path, at(1), doubtful, at(4))
    assert hollow(ax) == ({2}, {1, 2, 4})
    assert ax.get_title(loc="left").splitlines()[1] == f"hollow: {kind}"


def test_a_marker_is_hollow_at_the_edge_of_a_grid(tmp_path):
    rates = (0.002, 0.004, 0.008)  # the best is the lowest
    ax = drawn(tmp_path, at(2, rates=rates), tuning={"rates": rates, "seeds": [0], "length": 0.5, "most_rates": 3})
    assert hollow(ax) == ({2}, {2}) and covered(ax) == ([], [2])
    assert ax.get_title(loc="left").splitlines()[1] == "hollow: rate at an edge"


def test_no_band_reaches_a_point_of_one_seed(tmp_path):
    ax = drawn(tmp_path, at(1), at(2), at(4, [50.0]))
    assert covered(ax) == ([(1, 2)], [])
    ax = drawn(tmp_path, at(1, [50.0]), at(2), at(4, [50.0]))  # a bar where no band ends
    assert covered(ax) == ([], [2])


def test_render_takes_what_has_a_meaning_for_it(tmp_path, capsys):
    file, results = declared(tmp_path), tmp_path / "results"
    results.mkdir()
    for extra in (["--cells", "plain@1"], ["--jobs", "4"], ["--dry-run"], ["--resume"], ["workers=2"]):
        status, out, err = run("sweep", file, "--results", results, "--render", *extra, capsys=capsys)
        said = f"sweep: got {extra[0]} with --render, which trains nothing, expected --results, --run and --data"
        assert status == 2 and not out and err.splitlines() == [f"stepsnet: {said}"]
    status, out, err = run("sweep", file, "--results", results, "--render", capsys=capsys)
    assert status == 0 and out.startswith("0 of 10 runs have ended"), err


def test_render_refuses_what_holds_no_results_of_the_study(tmp_path, capsys):
    file, results = declared(tmp_path), tmp_path / "results"
    results.mkdir()
    (results / "speed.json").write_text('{"seconds": 1.0}')
    for place, said in (
        (results, "has no results of toy, expected those of its runs"),
        (results / "speed.json", "is not a folder, expected a folder with the results of runs"),
        (tmp_path / "typo", "does not exist, expected a folder with the results of runs"),
    ):
        status, out, err = run("sweep", file, "--results", place, "--render", capsys=capsys)
        assert status == 2 and not out and err.splitlines() == [f"stepsnet: --results: {place} {said}"]
    assert read_results(results, find_study(str(file))) == {}


def test_what_the_first_page_says_of_single_runs():
    """README's sentence on the seven-step runs, which no table shows seed by seed."""
    root = Path(__file__).parents[1]
    said = (
        "at the compute of 96 blocks, each of the three seven-step runs scores higher than every other full-length run"
    )
    assert f"{said} except those of the 6 wide blocks" in " ".join((root / "README.md").read_text().split())
    found = [json.loads(file.read_text()) for file in (root / "results/evidence-cifar10-depth").glob("*-96-*.json")]
    finals = [
        (run["contender"], run["variant"], run["metrics"]["test_top1"]) for run in found if run["kind"] == "final"
    ]
    seven = [score for contender, _, score in finals if contender == "seven"]
    wide = [score for _, variant, score in finals if variant == "6x132"]
    others = [score for contender, variant, score in finals if contender != "seven" and variant != "6x132"]
    assert len(seven) == len(wide) == 3 and len(others) == 18
    assert max(others) < min(seven) < max(seven) < min(wide)
