"""What is wrong with a declaration or a command is one line, before anything is trained."""

import json

import pytest
from toy_study import TOY, declared, run

from stepsnet.study.declare import studies


def change(**of_contender):
    return {"contenders": [{**TOY["contenders"][0], **of_contender}]}


WIDE = {"name": "wide", "points": {2: {"model.args.widths": [32], "model.args.depths": [1]}}}


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"criteria": [{**TOY["criteria"][0], "left": "plian@2"}]},
            "got 'plian@2', expected a contender@point (did you",
        ),
        ({"criteria": [{**TOY["criteria"][0], "right": "plain@3"}]}, "got 'plain@3'"),
        ({"tuning": {"rates": [0.001, 0.002]}}, "tuning.rates: got [0.001, 0.002], expected at least 3"),
        ({"tuning": {"rates": [0.001, 0.004, 0.002]}}, "that increase"),
        ({"tuning": {"rates": [0.001, 0.002, "fast"]}}, "tuning.rates.2: got 'fast', expected a valid number"),
        ({"tuning": {**TOY["tuning"], "seed": 1}}, "seeds: got 1 among them, the tuning's seed"),
        ({"seeds": [1]}, "seeds: got [1], expected at least 2"),
        ({"seeds": [1, -2]}, "seeds: got -2, expected 0 to"),
        ({"tuning": {**TOY["tuning"], "seed": -4}}, "seeds: got -4, expected 0 to"),
        ({"tuning": {"rates": [0.001, 0.002, 1e300]}}, "that increase, to 1e+06"),
        ({"tuning": {**TOY["tuning"], "length": 1e-9}}, "tuning.length: got 1e-09"),
        ({"tuning": {**TOY["tuning"], "most_rates": -4}}, "tuning.most_rates: got -4"),
        ({"macs_tolerance": -1}, "macs_tolerance: got -1"),
        ({"flatness": {"key": "nope"}}, "flatness.key: got 'nope'"),
        ({"name": "../up"}, "name: got '../up'"),
        ({"settings": {**TOY["settings"], "seed": 3}}, "settings: got seed among the settings"),
        ({"criteria": [{**TOY["criteria"][0], "right": TOY["criteria"][0]["left"]}]}, "on both sides"),
        (change(variants={"../x": {}}), "got the variant '../x'"),
        ({"seeds": [1, 1]}, "seeds: got [1, 1]"),
        ({"recipe": "digits/tyni"}, "plain@1: recipe: got 'digits/tyni'"),
        ({"recipe": "gone.yaml"}, "cannot read gone.yaml"),
        ({"contenders": [*TOY["contenders"], WIDE]}, "wide@2: got 0.22M multiply-accumulates"),
        (change(settings={"model.args.num_heads": [3]}), "model steps_deit_tiny_patch16_224"),
        (change(settings={"epoch": 3}), "plain@1: unknown key 'epoch'"),
        (change(points={}), "plain has no points"),
        (change(name="a b"), "got the name 'a b'"),
        (change(pionts={}), "contenders: unknown key 'pionts'"),
        ({"settings": {**TOY["settings"], "holdout": None}}, "plain@1: got no holdout"),
        ({"metric": "top2"}, "metric: got 'top2'"),
        ({"order": [["plain@2", "plain@2"]]}, "order: got plain@2 twice"),
        (
            {"claims": [{**TOY["claims"][0], "criteria": ["gian"]}]},
            "got the criterion 'gian', expected a declared one (did",
        ),
        ({"recipe": "pennfudan/tiny"}, "recipe: got 'pennfudan/tiny'"),
        ({"seed": 3}, "unknown key 'seed'"),
        ({"claims": [{"text": "Depth helps.", "criteria": ["gain"]}]}, "claims.0.denial: got none, expected one"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_trained(tmp_path, capsys, changes, words):
    status, _, err = run("sweep", declared(tmp_path, **changes), "--run", tmp_path / "run", capsys=capsys)
    assert status == 2 and words in err and len(err.splitlines()) == 1, err
    assert not (tmp_path / "run").exists()


def test_a_damaged_result_is_one_line(tmp_path, capsys):
    file = declared(tmp_path)
    results = tmp_path / "results"
    results.mkdir()
    (results / "a.json").write_text(json.dumps({"study": "toy", "run": "plain-1-tuning", "contender": "plain"}))
    for option in ("--render", "--dry-run"):
        status, _, err = run("sweep", file, option, "--results", results, "--run", tmp_path / "run", capsys=capsys)
        assert status == 2 and "a.json has no point, expected a file as a run of the study leaves it" in err
        assert len(err.splitlines()) == 1


def test_a_study_declares_all_but_the_machine(tmp_path, capsys):
    file = declared(tmp_path)
    for extra, words in (
        ("lr=0.1", "expected one of accumulation_steps"),
        ("digits/deep", "got digits/deep with the study toy"),
        ("--seeds=0,1", "got --seeds 0,1 with the study toy"),
        ("--cells=plain@2,plain@3", "--cells: got 'plain@3', expected a contender@point (did you mean plain@2"),
    ):
        status, _, err = run("sweep", file, extra, "--run", tmp_path / "run", capsys=capsys)
        assert status == 2 and words in err
    for extra in ("--render", "--cells=plain@2"):
        status, _, err = run("sweep", "digits/tiny", extra, capsys=capsys)
        assert status == 2 and f"expected a study for {extra.partition('=')[0]}" in err
    status, _, err = run("sweep", "evidence/cifar10-dept", capsys=capsys)
    assert status == 2 and "did you mean evidence/cifar10-depth" in err
    status, out, _ = run("sweep", capsys=capsys)
    assert status == 0 and out.split() == list(studies())
