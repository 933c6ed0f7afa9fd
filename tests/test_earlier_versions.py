"""Run folders of earlier versions: what is read under its old name, and what is refused."""

import json

import pytest
import yaml

from stepsnet.errors import UserError
from stepsnet.from_data import as_begun
from stepsnet.overrides import override, read_recipe, to_plain
from stepsnet.recipes import find_recipe
from stepsnet.report.load_runs import load_run
from stepsnet.run_folder import open_run_folder, read_run_recipe

NEW_FIELDS = ("title", "holdout", "score_test", "clean_samples", "cache", "import", "import_from")
NEW_FIELDS += ("init", "baseline_init")
# what earlier versions of a recipe named, and this one leaves to the data
NAMED = {
    "digits/deep": {"img_size": 8, "in_chans": 1, "num_classes": 10},
    "cifar10/deep": {"img_size": 32, "num_classes": 10},
    "pennfudan/mask_rcnn": {"num_classes": 1},
}


def earlier(folder, recipe):
    """A run folder as the version before 2026-11-22 wrote it."""
    config = {key: value for key, value in to_plain(recipe).items() if key not in NEW_FIELDS}
    if recipe.name in NAMED:
        config["model"]["args"] |= NAMED[recipe.name]
        config["baseline"]["args"] |= NAMED[recipe.name]
        config |= {"img_size": None} if "img_size" in config else {}
    config["probe_epochs"], config["signal_interval"] = config.pop("stream_epochs"), config.pop("stream_interval")
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_old_names_are_read_with_a_line(tmp_path, capsys):
    folder = earlier(tmp_path / "old", find_recipe("digits/tiny"))
    assert read_recipe(folder / "config.yaml").stream_epochs == 5
    assert "probe_epochs is now called stream_epochs" in capsys.readouterr().err
    assert override(find_recipe("digits/tiny"), ["probe_epochs=3"]).stream_epochs == 3


@pytest.mark.parametrize("name", ["deeper/steps_deit_24", *NAMED])
def test_an_old_run_is_resumed_by_its_recipes_name(tmp_path, name):
    recipe = find_recipe(name)
    folder = earlier(tmp_path / "old", override(recipe, ["stream_epochs=0"]))
    open_run_folder(folder, recipe, resume=True)
    with pytest.raises(UserError, match="holds a run with lr"):
        open_run_folder(folder, override(recipe, ["lr=0.5"]), resume=True)
    with pytest.raises(UserError, match="holds a run with model"):
        open_run_folder(folder, override(recipe, ["model.args.num_classes=7"]), resume=True)


def test_an_old_run_on_greyscale_images_goes_on_in_color(tmp_path):
    """Earlier versions did not look at the images; the recipe of today would take one channel."""
    folder = earlier(tmp_path / "old", find_recipe("cifar10/deep"))
    begun = as_begun(find_recipe("cifar10/deep"), read_run_recipe(folder))
    assert to_plain(begun)["model"] == to_plain(read_run_recipe(folder))["model"] and "in_chans" not in begun.model.args
    assert begun.img_size is None and begun.model.args["img_size"] == 32


def test_seeds_of_two_versions_are_of_one_recipe(tmp_path):
    recipe = find_recipe("digits/tiny")
    old = load_run(earlier(tmp_path / "old", recipe))
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text(yaml.safe_dump(to_plain(override(recipe, ["seed=1"]))))
    new = load_run(tmp_path / "new")
    assert old.recipe_key == new.recipe_key and (old.seed, new.seed) == (0, 1)


def test_weights_of_the_other_channel_order_are_refused(tmp_path):
    recipe = override(find_recipe("digits/steps_12"), ["model.args.reverse=true"])
    folder = earlier(tmp_path / "old", recipe)
    for use in (read_run_recipe, lambda folder: open_run_folder(folder, recipe, resume=True)):
        with pytest.raises(UserError, match="trained with reverse=True by an earlier version"):
            use(folder)
    assert json.loads(json.dumps(recipe.model.args))["reverse"] is True
