"""Every shipped recipe: it is found by name, its numbers are the paper's, and it survives its YAML."""

import dataclasses
import functools
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from recipe_names import AT_SCALE, DETECTION, NAMES, plain

from stepsnet.analysis.complexity import count_complexity
from stepsnet.engine.optim import scaled_lr
from stepsnet.errors import UserError
from stepsnet.models import baseline_of
from stepsnet.models.build import build_model
from stepsnet.paper.tables import ALLOCATION_IS_OURS, TABLE_1, model_of, note_of, printed_rows
from stepsnet.recipes import RECIPES, find_recipe
from stepsnet.settings.config import Augment, ModelSpec, SegmentationAugment
from stepsnet.settings.overrides import override, read_recipe, to_yaml
from stepsnet.tasks.classification.task import input_spec
from stepsnet.tasks.classification.transforms import InputSpec


@functools.cache
def on_meta(name, args):
    with torch.device("meta"):
        return build_model(ModelSpec(name, json.loads(args)))


def rows(*tables):
    return [row for table in tables for row in printed_rows(table)]


@functools.cache
def by_model(folder):
    """The recipes of a folder by their model, without its stochastic depth."""
    found = {}
    for name in AT_SCALE:
        if name.startswith(folder):
            model = find_recipe(name).model
            args = {key: value for key, value in model.args.items() if key != "drop_path_rate"}
            found.setdefault(json.dumps([model.name, args], sort_keys=True), []).append(name)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_builds_by_name_and_survives_its_yaml(name, tmp_path):
    recipe = find_recipe(name)
    assert recipe.name == name
    (tmp_path / "config.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    again = read_recipe(tmp_path / "config.yaml")
    assert plain(again) == plain(recipe)
    for spec in (recipe.model, recipe.baseline):
        if spec:
            model = on_meta(spec.name, json.dumps(spec.args))
            if name in AT_SCALE:
                inputs = input_spec(recipe, model)
                assert (inputs.input_size, inputs.crop_pct) == ((3, 224, 224), 0.875)
                assert inputs.mean == (0.485, 0.456, 0.406) and inputs.std == (0.229, 0.224, 0.225)


@pytest.mark.parametrize(
    "name",
    [
        "resnet50",
        "steps_deit_small",
        "steps_swin_tiny",
        "steps_swinpp_tiny",
        "steps_resnet50",
    ],
)
def test_images_are_resized_as_the_baselines(name):
    recipe = find_recipe(f"imagenet/{name}")
    model = on_meta(recipe.model.name, json.dumps(recipe.model.args))
    assert input_spec(recipe, model).interpolation == "bicubic"


def test_every_recipe_says_what_it_is_in_a_line():
    for recipe in RECIPES.values():
        assert recipe.title and "\n" not in recipe.title and not recipe.title.endswith("."), recipe.name


@pytest.mark.parametrize(("folder", "tables"), [("imagenet", "1"), ("deeper", "5a 5b"), ("ablations", "8 9 10 11")])
def test_every_row_has_a_recipe_that_expects_the_printed_number(folder, tables):
    for row in rows(*tables.split()):
        name, args = model_of(row)
        found = by_model(folder)[json.dumps([name, plain(args)], sort_keys=True)]
        start = f"Table {row['table']}, {row['row']}"
        (recipe,) = [recipe for recipe in found if RECIPES[recipe].title.partition(" (the")[0] == start]
        assert find_recipe(recipe).expected == {"val_top1": row["top1"]}
        assert (note_of(row) == ALLOCATION_IS_OURS) == (ALLOCATION_IS_OURS in RECIPES[recipe].title)
    wanted = {"imagenet": 18 + 1 + 6, "deeper": 20, "ablations": 5 + 6 + 2 + 6}
    assert len([name for name in AT_SCALE if name.startswith(folder)]) == wanted[folder]


def test_table_1_is_set_beside_its_baselines():
    for title, model in TABLE_1.items():
        recipe = find_recipe(f"imagenet/{model.split('_patch')[0]}")
        assert recipe.model.name == model
        if title.startswith("Steps-"):
            assert recipe.baseline.name == baseline_of(model)
            own = find_recipe(f"imagenet/{recipe.baseline.name.split('_patch')[0]}")
            assert recipe.baseline == own.model and own.baseline is None
    for name in ("steps_deit_base_d60", "steps_swinpp_tiny", "steps_swinpp_small", "steps_swinpp_base"):
        recipe = find_recipe(f"imagenet/{name}")
        assert recipe.baseline.name == baseline_of(recipe.model.name) and recipe.expected == {}


@pytest.mark.parametrize(
    ("steps", "baseline"),
    [(f"steps_deit_{n}", f"fixed_width_{n}") for n in (24, 36, 48, 72, 96)]
    + [(f"steps_swin_{n}", f"swin_{m}") for n, m in ((14, 12), (26, 24), (48, 48), (64, 72), (96, 96))],
)
def test_the_deep_are_set_beside_the_nearest_baseline(steps, baseline):
    assert find_recipe(f"deeper/{steps}").baseline == find_recipe(f"deeper/{baseline}").model
    assert find_recipe(f"deeper/{baseline}").baseline is None


@pytest.mark.parametrize("first", ["steps_1", "depths_0_0_12", "wide_to_narrow", "stage_none"])
def test_an_ablation_is_set_beside_the_first_of_its_table(first):
    base = find_recipe(f"ablations/{first}")
    table = base.title.split(",")[0]
    others = [name for name in AT_SCALE if RECIPES[name].title.startswith(f"{table},") and name != base.name]
    assert base.baseline is None and others
    assert all(find_recipe(name).baseline == base.model for name in others)


@pytest.mark.parametrize("name", AT_SCALE)
def test_settings_are_the_papers(name):
    recipe = find_recipe(name)
    assert (recipe.opt, recipe.epochs, recipe.batch_size, recipe.warmup_epochs) == ("adamw", 300, 1024, 20)
    assert (recipe.lr, recipe.warmup_lr, recipe.min_lr, recipe.sched) == (1e-3, 5e-7, 5e-6, "cosine")
    assert (recipe.weight_decay, recipe.clip_grad) == (0.05, 5.0)
    assert recipe.opt == "adamw" and recipe.betas is recipe.eps is None  # AdamW's own, 0.9, 0.999 and 1e-8
    assert (recipe.label_smoothing, recipe.amp_dtype, recipe.data) == (0.1, "bfloat16", "folder:imagenet")
    augment = recipe.augment
    assert (augment.auto_augment, augment.color_jitter) == ("rand-m9-mstd0.5-inc1", 0.4)
    assert (augment.mixup, augment.cutmix, augment.re_prob, augment.re_mode) == (0.8, 1.0, 0.25, "pixel")
    assert scaled_lr(recipe) == 1e-3
    assert scaled_lr(dataclasses.replace(recipe, batch_size=2048)) == pytest.approx(2e-3)
    assert scaled_lr(dataclasses.replace(recipe, batch_size=512)) == pytest.approx(5e-4)


DROP_PATHS = {
    "imagenet/resnet": 0.0,
    "imagenet/steps_resnet": 0.0,
    "imagenet/deit": 0.1,
    "imagenet/steps_deit": 0.1,
    "imagenet/swin_tiny": 0.2,
    "imagenet/swin_small": 0.3,
    "imagenet/swin_base": 0.5,
    "imagenet/steps_swin_tiny": 0.2,
    "imagenet/steps_swin_small": 0.3,
    "imagenet/steps_swin_base": 0.5,
    "imagenet/swinpp_tiny": 0.2,
    "imagenet/swinpp_small": 0.3,
    "imagenet/swinpp_base": 0.5,
    "imagenet/steps_swinpp_tiny": 0.2,
    "imagenet/steps_swinpp_small": 0.3,
    "imagenet/steps_swinpp_base": 0.5,
    "deeper/fixed_width": 0.1,
    "deeper/steps_deit": 0.1,
    "deeper/swin": 0.2,
    "deeper/steps_swin": 0.2,
    "ablations/steps": 0.1,
    "ablations/depths": 0.1,
    "ablations/wide_to_narrow": 0.2,
    "ablations/narrow_to_wide": 0.2,
    "ablations/stage": 0.2,
}


@pytest.mark.parametrize("name", AT_SCALE)
def test_stochastic_depth_is_the_baselines(name):
    (expected,) = [rate for prefix, rate in DROP_PATHS.items() if name.startswith(prefix)]
    recipe = find_recipe(name)
    for spec in (recipe.model, recipe.baseline):
        if spec:
            assert spec.args["drop_path_rate"] == expected
            model = on_meta(spec.name, json.dumps(spec.args))
            rates = [m.drop_prob for m in model.modules() if type(m).__name__ == "DropPath"]
            assert max(rates, default=0.0) == pytest.approx(expected)  # the last block's


def test_recipes_are_of_their_own():
    one, other = find_recipe("ablations/steps_3"), find_recipe("ablations/steps_3")
    one.model.args["widths"] = ()
    assert other.model.args["widths"] == [192, 272, 384]


def test_an_unknown_name_is_answered_in_a_line():
    with pytest.raises(UserError) as raised:
        find_recipe("imagenet/steps_diet_small")
    message = str(raised.value)
    assert "did you mean imagenet/steps_deit_small" in message and "`stepsnet recipes`" in message
    assert len(message) < 250


def test_listing_is_light():
    code = (
        "import sys; from stepsnet.recipes import RECIPES, find_recipe\n"
        "assert len(RECIPES) > 60; find_recipe('imagenet/steps_deit_small')\n"
        "heavy = {'torch', 'timm', 'numpy', 'transformers', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_row_of_table_4_has_a_recipe():
    for row in rows("4"):
        recipe = find_recipe("wikitext103/" + row["row"].lower().replace("-", "_").replace(" ", "_"))
        assert recipe.expected == {"val_perplexity": row["perplexity"]}
        assert (recipe.vocab_size, recipe.seq_len, recipe.batch_size * recipe.seq_len) == (50_000, 128, 128 * 1024)
        assert recipe.model.args["widths"] == model_of(row)[1]["widths"]
        assert (recipe.baseline is not None) == row["row"].startswith("Steps-")
    assert find_recipe("wikitext103/steps_transformer_64m").baseline.args["depths"] == [12]


def test_every_row_of_table_2_has_a_recipe_with_swins_settings():
    """facts.md: the schedules, the optimizer, and what an epoch and a sample are."""
    found = [name for name in DETECTION if name.startswith("coco/")]
    assert len(found) == 12
    for row in rows("2a", "2b"):
        name, args = model_of(row)
        (recipe,) = [find_recipe(n) for n in found if RECIPES[n].title == f"Table {row['table']}, {row['row']}"]
        assert recipe.model.name == name and recipe.model.args["backbone"] == args["backbone"]
        printed = {f"val_{key.lower()}": value for key, value in row.items() if "_AP" in key and value is not None}
        assert recipe.expected == printed
        expected = {"1x": (12, (8, 11)), "3x": (36, (27, 33))}[row["schedule"]]
        assert (recipe.epochs, recipe.milestones, recipe.sched, recipe.decay_rate) == (*expected, "multistep", 0.1)
        assert (recipe.opt, recipe.lr, recipe.weight_decay, recipe.batch_size) == ("adamw", 1e-4, 0.05, 16)
        assert recipe.warmup_epochs * 117_266 / 16 == pytest.approx(1000) and recipe.clip_grad is None
        assert recipe.without_objects == "leave_out"
        if row["row"].startswith("Steps-"):
            of_baseline = row["row"].removeprefix("Steps-")
            (base,) = [find_recipe(n) for n in found if RECIPES[n].title.endswith(f", {of_baseline}")]
            assert recipe.baseline == base.model and base.baseline is None


def test_penn_fudan_is_set_beside_a_swin_of_like_compute():
    from stepsnet.analysis.complexity import detector_macs

    for name in ("pennfudan/mask_rcnn", "pennfudan/cascade"):
        recipe = find_recipe(name)
        counts = []
        for spec in (recipe.model, recipe.baseline):
            model = on_meta(spec.name, json.dumps(spec.args))
            counts.append((detector_macs(model, (3, 160, 256)), sum(p.numel() for p in model.parameters())))
        (steps, steps_params), (base, base_params) = counts
        assert sum(steps.values()) == pytest.approx(sum(base.values()), rel=0.03)
        assert steps_params == pytest.approx(base_params, rel=0.03)
        assert {key: steps[key] for key in ("rpn", "boxes", "masks")} == {
            key: base[key] for key in ("rpn", "boxes", "masks")
        }


def test_table_3_has_the_settings_of_swin():
    for row in rows("3"):
        recipe = find_recipe(
            "ade20k/" + {"Swin-T UPerNet": "swin_tiny", "Steps-Swin-T UPerNet": "steps_swin_tiny"}[row["row"]]
        )
        assert recipe.expected == {"val_miou": row["mIoU"], "val_macc": row["mAcc"]}
        assert recipe.epochs * recipe.epoch_updates == 160_000 and recipe.batch_size == 16
        assert round(recipe.warmup_epochs * recipe.epoch_updates) == 1500 and recipe.min_lr == 0
        assert (recipe.lr, recipe.weight_decay, recipe.sched, recipe.poly_power) == (6e-5, 0.01, "poly", 1.0)
        assert (recipe.scale, recipe.crop_size, recipe.augment.max_class_share) == ((2048, 512), 512, 0.75)
        assert (recipe.augment.scale_range, recipe.augment.hflip, recipe.augment.photometric) == ((0.5, 2.0), 0.5, True)
        assert recipe.model.args["backbone_args"] == {"drop_path_rate": 0.3}
    assert recipe.baseline == find_recipe("ade20k/swin_tiny").model


def test_small_segmentation_models_are_of_like_compute():
    recipe = find_recipe("camvid/tiny")
    models = [on_meta(spec.name, json.dumps(spec.args)) for spec in (recipe.model, recipe.baseline)]
    params, macs = zip(*((c.params, c.macs) for c in (count_complexity(model, (3, 128, 128)) for model in models)))
    assert macs[0] == pytest.approx(macs[1], rel=0.02) and params[0] == pytest.approx(params[1], rel=0.05)


def test_a_partial_augmentation_keeps_off_what_it_does_not_name(tmp_path):
    """Given as a mapping it is the whole; a single key of it leaves the others as they are, or off."""
    plain_digits, cifar = find_recipe("digits/tiny"), find_recipe("cifar10/shallow")
    (tmp_path / "mine.yaml").write_text(to_yaml(plain_digits).replace("augment: null", "augment: {hflip: 0.5}"))
    flips = Augment(hflip=0.5)
    assert read_recipe(tmp_path / "mine.yaml").augment == flips
    assert override(plain_digits, ["augment.hflip=0.5"]).augment == flips
    assert override(cifar, ['augment={"hflip":0.5}']).augment == flips
    assert override(cifar, ["augment.hflip=0.2"]).augment == dataclasses.replace(cifar.augment, hflip=0.2)
    assert override(find_recipe("camvid/tiny"), ["augment={}"]).augment == SegmentationAugment()
    # of an image that is no square, the middle, and the same each time
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 48, 3), dtype=np.uint8))
    spec = InputSpec((3, 24, 24), (0.5,) * 3, (0.5,) * 3, crop_pct=1.0)
    assert torch.equal(spec.training(Augment())(image), spec.evaluation()(image))
