"""A study with a row a contender, and as docs/depth-bench.md shows it."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from scipy import stats
from toy_study import declared, records

from stepsnet.errors import UserError
from stepsnet.settings.config import ModelSpec
from stepsnet.study.declare import Cell, find_study, studies
from stepsnet.study.leaderboard import _traffic, leaderboard
from stepsnet.study.record import settings_of
from stepsnet.study.render import render_study
from stepsnet.study.run_plan import Planned, recipe_of

STEPS = {"model.args.widths": [8, 16], "model.args.num_heads": [1, 1], "model.args.residual": "dense_former"}
CONTENDERS = [
    {"name": "plain", "points": {4: {"model.args.depths": [4]}, 8: {"model.args.depths": [8]}}},
    {"name": "steps", "label": "ours", "settings": STEPS, "points": {8: {"model.args.depths": [5, 3]}}},
    {"name": "mhc", "settings": {"model.args.residual": "mhc"}, "points": {8: {"model.args.depths": [8]}}},
    {"name": "laurel", "settings": {"model.args.residual": "laurel"}, "points": {8: {"model.args.depths": [8]}}},
]


def keep(study, found, folder):
    """Write records of a declared study where its pages look for them, with the settings that it declares."""
    study = find_study(study)
    for record in found:
        run = Planned(Cell(record["contender"], record["point"]), record["kind"], "", record["rate"], record["seed"])
        settings = settings_of(recipe_of(study, run))
        (folder / "results" / "toy" / f"{run.name}.json").write_text(json.dumps(record | {"settings": settings}))


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """docs/render_runs.py with results and figures of its own, and the toy's declaration."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "docs")
    module = importlib.import_module("render_runs")
    monkeypatch.setattr("render_parts.RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "FIGURES", tmp_path)
    (tmp_path / "results" / "toy").mkdir(parents=True)
    flatness = {"share": 0.5, "within": 0.1}
    return module, str(declared(tmp_path, contenders=CONTENDERS, criteria=[], claims=[], flatness=flatness))


def test_a_leaderboard_says_what_is_there_and_what_is_not(pages, tmp_path):
    module, study = pages
    before = leaderboard(find_study(study), {})
    assert before.count("not yet run") == 5 and "0 of 25 runs have ended" in before
    assert (
        module.leaderboard_table(study) == "None of its 25 runs has ended yet. Declared are: plain; ours; mhc; laurel."
    )
    found = [
        *records(Cell("plain", 8), [50.0, 51.0]),
        *records(Cell("steps", 8), [60.0, 62.0], moved=0.5),
        *records(Cell("mhc", 8), [], rates=(0.001, 0.002)),
        *records(Cell("plain", 4), [40.0]),
    ]
    keep(study, found, tmp_path)
    lines = module.leaderboard_table(study).splitlines()
    assert lines[0].split(" | ")[1:3] == ["4 blocks", "8 blocks"]
    ours, plain, mhc, laurel = (line.strip("| ").split(" | ") for line in lines[2:6])
    assert ours[:3] == ["ours", "–", "61.0 ± 1.4 (not converged)"]  # the best first, though declared second
    assert plain[:3] == ["plain", "40.0 (1 of 2 seeds)", "50.5 ± 0.7"]
    assert mhc[:3] == ["mhc", "–", "in tuning, 2 runs"] and laurel[:3] == ["laurel", "–", "not yet run"]
    assert plain[3:] == ["0.002", "12.00 k", "3.00 M", "1.00", "arXiv 1603.05027"] and laurel[3:6] == ["–", "—", "—"]
    # 5 blocks of 8 and 3 of 16, of 6 + (sources + 1), and the step between; against 8 blocks of 16, of 6
    first, second = sum(6 + i + 2 for i in range(1, 6)), sum(6 + i + 2 for i in range(1, 4))
    assert float(ours[6]) == pytest.approx((8 * first + 16 * second + 2 * 16) / (6 * 8 * 16), abs=0.005)
    assert ours[7] == "arXiv 2511.14329, arXiv 2402.02622"
    few = [*CONTENDERS[:2], {**CONTENDERS[2], "points": {4: CONTENDERS[2]["points"][8]}}]  # none where costs are given
    (tmp_path / "few").mkdir()
    of_few = find_study(str(declared(tmp_path / "few", contenders=few, criteria=[], claims=[])))
    table = leaderboard(of_few, {record["run"]: record for record in found if record["contender"] != "mhc"})
    mhc = next(line for line in table.splitlines() if line.startswith("| mhc"))
    assert mhc.strip("| ").split(" | ")[2:7] == ["–"] * 5
    assert not [line for line in lines if line.startswith("Diverged in tuning")]
    lost = list(records(Cell("steps", 8), [60.0, 62.0]))
    del lost[-1]["metrics"]  # one seed more, which has diverged
    keep(study, lost, tmp_path)
    exploded = [{**one, "diverged": "a loss of NaN"} for one in records(Cell("mhc", 8), [], rates=(0.002,))]
    del exploded[0]["metrics"]
    keep(study, exploded, tmp_path)
    assert "\n\nDiverged in tuning, by rate: mhc at 8 blocks with 0.002.\n" in module.leaderboard_table(study)
    first, second = (line.strip("| ").split(" | ") for line in module.leaderboard_table(study).splitlines()[2:4])
    assert first[0] == "plain" and second[:3] == ["ours", "–", "60.0 (1 of 2 diverged)"]  # worse than any score
    assert lines[-1] == "![Test top-1 accuracy by blocks, a curve a contender](figures/toy.png)"
    module.study_figure(study)
    assert (tmp_path / "toy.png").stat().st_size > 5000


def test_the_difference_of_two_differences_is_paired_by_seed(pages, tmp_path):
    module, study = pages
    shallow, deep, ours = [50.0, 52.0], [45.0, 44.0], [60.0, 65.0]
    for cell, scores, moved in [("plain", 4), shallow, 0.0], [("plain", 8), deep, 0.0], [("steps", 8), ours, 0.5]:
        keep(study, records(Cell(*cell), scores, moved), tmp_path)
    table = module.differences_table(study, "plain@4-plain@8", "plain@4-plain@8/steps@8-plain@8", "level=0.99")
    headers, _, alone, both, *notes = table.splitlines()
    assert "99% interval" in headers and "steps@8" in notes[-1] and "still moved" in notes[-1]  # 0.5 in the end
    assert alone.split(" | ")[:3] == ["| plain@4", "plain@8", "+6.5"]  # of 5 and 8
    assert both.split(" | ")[:3] == ["| plain@4 minus plain@8", "steps@8 minus plain@8", "-11.5"]  # 5 - 15 and 8 - 21
    corrected = "Corrected for there being 2 differences (Bonferroni, at 99%: p below 0.005), none remains."
    assert notes[:2] == ["", corrected]
    half = 63.657 * 1.5  # of two values: t of one degree of freedom at 99%, times half of their distance
    assert both.split(" | ")[3] == f"{-11.5 - half:+.1f} to {-11.5 + half:+.1f}"
    with pytest.raises(ValueError, match=r"plain@4 against mhc@8: .*expected cells whose runs have ended"):
        module.differences_table(study, "plain@4-mhc@8")


def test_differences_say_what_remains_if_corrected_for_their_number(pages, tmp_path):
    module, _ = pages
    study = str(declared(tmp_path, contenders=CONTENDERS, criteria=[], claims=[], seeds=[1, 2, 3]))
    base, near, far = [50.0, 51.0, 52.0], [52.0, 53.0, 54.2], [60.0, 61.0, 62.1]
    for cell, scores in [(("plain", 4), base), (("plain", 8), near), (("steps", 8), far)]:
        keep(study, records(Cell(*cell), scores), tmp_path)
    p = stats.ttest_rel(near, base).pvalue, stats.ttest_rel(far, near).pvalue
    for level, said in (
        (1 - 2.001 * p[0], "plain@8 against plain@4 and steps@8 against plain@8 remain."),
        (1 - 1.999 * p[0], "steps@8 against plain@8 remains."),
        (1 - 1.999 * p[1], "none remains."),
    ):
        lines = module.differences_table(study, "plain@8-plain@4", "steps@8-plain@8", f"level={level}").splitlines()
        assert lines[4] == "" and lines[5].startswith("Corrected for there being 2 differences (Bonferroni, at ")
        assert lines[5].endswith(f"), {said}")
    assert "Corrected" not in module.differences_table(study, "plain@8-plain@4")  # one needs no correction


def test_differences_say_which_pairs_are_of_two_kinds_of_machine(pages, tmp_path):
    module, study = pages
    for cell, cpus in [(("plain", 4), "this this"), (("plain", 8), "this that"), (("steps", 8), "that that")]:
        found = list(records(Cell(*cell), [50.0, 52.0]))
        for record, cpu in zip(found[-2:], cpus.split()):
            record |= {"hardware": {"cpu": cpu, "gpu": None}, "versions": {"torch": "2"}, "commit": "abc"}
        keep(study, found, tmp_path)
    table = module.differences_table(study, "plain@4-plain@8", "steps@8-plain@4", "plain@4-plain@8/steps@8-plain@8")
    unlike = "plain@4 against plain@8 (1 of 2 pairs); steps@8 against plain@4 (2 of 2 pairs); steps@8 against plain@8"
    assert table.endswith(
        f"\n\nPairs of runs from two kinds of machine, whose rounding differs: {unlike} (1 of 2 pairs)."
    )


def test_a_cell_whose_runs_diverged_says_how_many_have_run(tmp_path):
    tuning = {"rates": [0.002, 0.004, 0.008], "seeds": [0, 7], "length": 0.5, "most_rates": 3}
    study = find_study(str(declared(tmp_path, contenders=CONTENDERS[:1], tuning=tuning, criteria=[], claims=[])))
    cell = Cell("plain", 8)
    found = list(records(cell, [50.0], rates=tuning["rates"]))  # the lowest rate is the best
    again = [{**one, "run": one["run"].replace("seed0", "seed7")} for one in found if one["kind"] == "tuning"]
    for record in (found[-1], found[2], again[2]):
        record |= {"metrics": {}, "diverged": "a loss of NaN"}
    table = leaderboard(study, {record["run"]: record for record in [*found, *again]})
    assert "| diverged (1 of 2 seeds, rate at an edge) |" in table
    assert "Diverged in tuning, by rate: plain at 8 blocks with 0.008.\n" in f"{table}\n"


def test_a_model_of_ones_own_has_arguments_of_its_own(tmp_path, monkeypatch):
    spec = {"steps": [2], "widths": 8, "depths": "auto", "residual": True}
    study = find_study(str(declared(tmp_path, contenders=CONTENDERS[:1], criteria=[], claims=[])))
    for model, args, source in [
        ("own_net", spec, "–"),
        ("own_net", {"widths": [8, 16], "depths": [1, 1]}, "–"),
        ("own_net", {"residual": "mhc"}, "arXiv 2512.24880"),
        ("grow", {"model": "run"}, "arXiv 2511.14329"),
        ("stepify", {"model": "resnet18"}, "arXiv 2511.14329"),
        ("stepify", {"model": "resnet18", "steps": 1}, "–"),
        ("steps_deit_tiny_patch16_224", {}, "arXiv 2511.14329"),
        ("steps_transformer", {"widths": 8, "depths": 6}, "arXiv 1603.05027"),  # each a list of one
        ("steps_transformer", {"widths": [8], "depths": 6}, "arXiv 1603.05027"),
        ("steps_transformer", {"depths": 6}, "arXiv 2511.14329"),
    ]:
        recipe = SimpleNamespace(model=ModelSpec(model, args))
        monkeypatch.setattr("stepsnet.study.leaderboard.recipe_of", lambda *_, recipe=recipe: recipe)
        assert leaderboard(study, {}).splitlines()[2].endswith(f"| {source} |")
    in_lists = ModelSpec("steps_transformer", {"widths": [8], "depths": [6]})
    assert _traffic(ModelSpec("steps_transformer", {"widths": 8, "depths": 6})) == _traffic(in_lists) is not None


def test_convergence_is_not_denied_where_it_is_not_known(tmp_path):
    study = find_study(str(declared(tmp_path, contenders=CONTENDERS[:1], criteria=[], claims=[])))
    found = {record["run"]: record | {"curve": []} for record in records(Cell("plain", 8), [60.0, 62.0])}
    assert "61.0 ± 1.4 (convergence unknown)" in leaderboard(study, found)


@pytest.mark.parametrize("name", studies())
def test_every_declared_study_has_its_pages(name):
    study = find_study(name)
    assert leaderboard(study, {}).count("not yet run") >= len(study.contenders) and render_study(study, {})
    there = {}
    for cell in study.cells:
        variant = next(iter(study.contender(cell.contender).variants), "")
        planned = Planned(cell, "final", variant, study.tuning.rates[1], study.seeds[0])
        there[planned.name] = {**next(iter(records(cell, [1.0]))), "kind": "final", "variant": variant}
    assert leaderboard(study, there) and render_study(study, there)
    if name == "evidence/cifar10-swin":
        sources = [line.strip("| ").split(" | ")[-2:] for line in leaderboard(study, {}).splitlines()[2:8]]
        assert sources == [["–", "arXiv 1603.05027"], *[["–", "arXiv 2511.14329"]] * 5]


def test_until_the_last_point_is_run_the_one_before_ranks(pages, tmp_path):
    module, _ = pages
    contenders = [{"name": name, "points": {4: {}, 8: {}}} for name in ("plain", "other")]
    study = str(declared(tmp_path, contenders=contenders, criteria=[], claims=[]))
    found = [*records(Cell("plain", 4), [40.0, 41.0]), *records(Cell("other", 4), [50.0, 51.0])]
    keep(study, found, tmp_path)
    rows = module.leaderboard_table(study).splitlines()[2:]
    assert [row.split(" | ")[0].strip("| ") for row in rows[:2]] == ["other", "plain"]
    assert all(row.split(" | ")[3:7] == ["0.002", "12.00 k", "3.00 M", "1.00"] for row in rows[:2])  # its costs too
    assert "The order, rates and costs are those at 4 blocks;" in "".join(rows)
    keep(study, records(Cell("plain", 8), [60.0]), tmp_path)  # one run of one of them does not rank them anew
    rows = module.leaderboard_table(study).splitlines()[2:]
    assert [row.split(" | ")[0].strip("| ") for row in rows[:2]] == ["other", "plain"]


def test_while_no_point_is_complete_the_one_with_most_runs_ranks(pages, tmp_path):
    module, _ = pages
    contenders = [{"name": name, "points": {4: {}, 8: {}}} for name in ("plain", "other", "third")]
    study = str(declared(tmp_path, contenders=contenders, criteria=[], claims=[]))
    keep(study, [*records(Cell("plain", 4), [40.0, 41.0]), *records(Cell("other", 4), [50.0])], tmp_path)
    keep(study, records(Cell("plain", 8), [60.0]), tmp_path)
    rows = module.leaderboard_table(study).splitlines()[2:]
    assert [row.split(" | ")[0].strip("| ") for row in rows[:2]] == ["other", "plain"]
    assert "The order, rates and costs are those at 4 blocks;" in "".join(rows)


def test_pages_are_of_what_is_declared(pages, tmp_path):
    module, study = pages
    keep(study, records(Cell("plain", 8), [50.0, 51.0]), tmp_path)
    changed = tmp_path / "results" / "toy" / "plain-8-final-lr0.002-seed1.json"
    record = json.loads(changed.read_text())
    record["settings"]["weight_decay"] = 0.9
    changed.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"seed1 was made with weight_decay 0\.9, expected 0\.05, as"):
        module.leaderboard_table(study)


def test_every_study_of_the_evidence_is_on_its_page_and_on_the_first():
    root = Path(__file__).parent.parent
    bench = {name for name in studies() if name.startswith("depth-bench/")}
    ours = {name for name in studies() if name.startswith(("evidence/", "stepify/"))}
    for page, block, expected in (("docs/evidence/index.md", "answers", ours | bench), ("README.md", "verdicts", ours)):
        shown = (root / page).read_text(encoding="utf-8").split(f"<!-- begin: {block} ")[1].split("<!-- end -->")[0]
        names, *rows = shown.splitlines()
        assert set(names.removesuffix(" -->").split()) == expected, page
        if block == "answers":
            assert {row.split("`")[1] for row in rows[2:]} == expected


def test_answers_say_what_may_be_claimed(pages, tmp_path):
    module, _ = pages
    criterion = {"name": "ours is ahead", "left": "steps@8", "right": "plain@8"}
    claim = {"text": "Ours is ahead.", "denial": "Ours is not ahead.", "criteria": ["ours is ahead"]}
    rules = {"seeds": [1, 2, 3], "flatness": {"share": 0.5, "within": 0.02}}
    study = str(declared(tmp_path, contenders=CONTENDERS, criteria=[criterion], claims=[claim], **rules))
    assert module.answers_table(study).splitlines()[-1].endswith('| 0 of 30 | "Ours is ahead": **not yet** |')
    found = [*records(Cell("plain", 8), [50.0, 51.0, 50.5]), *records(Cell("steps", 8), [40.0, 40.5, 41.0])]
    keep(study, found, tmp_path)
    assert "| 12 of 30 | **against**: Ours is not ahead: " in module.answers_table(study)
    keep(study, records(Cell("steps", 8), [49.0, 52.0, 50.5]), tmp_path)
    more = [claim, {"text": "Plain is behind.", "denial": "It is not.", "criteria": ["ours is ahead"]}]
    both = str(declared(tmp_path, contenders=CONTENDERS, criteria=[criterion], claims=more, **rules))
    undecided = '| "Ours is ahead": **undecided** "Plain is behind": **undecided** |'
    assert module.answers_table(both).splitlines()[-1].endswith(undecided)
