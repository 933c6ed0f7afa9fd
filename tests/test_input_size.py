"""Pictures of another size than the model's own: refused before anything is trained, unless the model takes them."""

import dataclasses

import pytest
import timm
import torch

from stepsnet.cli import main
from stepsnet.errors import UserError
from stepsnet.models.build import build_model
from stepsnet.recipes import find_recipe
from stepsnet.residual import DESIGNS, Connection
from stepsnet.settings.config import ModelSpec
from stepsnet.settings.overrides import override
from stepsnet.tasks.classification.input_size import check_input_size, fit_input_size, input_size

DEIT = ModelSpec("deit_tiny_patch16_224", {"depth": 1, "num_classes": 10})
RESNET = ModelSpec("resnet18", {"num_classes": 10})


def checked(spec, img_size, baseline=None):
    recipe = dataclasses.replace(find_recipe("cifar10/shallow"), model=spec, baseline=baseline, img_size=img_size)
    with torch.device("meta"):
        model = build_model(spec)
    if img_size:
        check_input_size(recipe, img_size, model)
    return input_size(recipe, model)


@pytest.mark.parametrize(
    "name", ["deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "steps_deit_tiny_patch16_224"]
)
def test_a_model_of_one_size_is_refused_and_the_key_named(name):
    assert checked(ModelSpec(name), None) == checked(ModelSpec(name), 224) == (3, 224, 224)
    with pytest.raises(UserError) as raised:
        checked(ModelSpec(name), 64)
    assert str(raised.value) == (
        f"img_size: got 64, expected 224, the size that {name} was built for (model.args.img_size=64 builds it for 64)"
    )
    with pytest.raises(UserError, match=r"\(baseline.args.img_size=64 builds"):
        checked(ModelSpec(name), 64, baseline=ModelSpec(name))


@pytest.mark.parametrize(
    "spec",
    [
        RESNET,
        ModelSpec("steps_resnet18"),
        ModelSpec("convnext_atto"),
        ModelSpec(DEIT.name, {**DEIT.args, "dynamic_img_size": True}),
        ModelSpec(DEIT.name, {**DEIT.args, "img_size": 64}),
    ],
    ids=lambda spec: "-".join([spec.name, *(key for key in spec.args if "size" in key)]),
)
def test_a_model_that_takes_it_is_let_through(spec):
    assert checked(spec, 64) == (3, 64, 64)


def test_the_reason_is_said_where_no_key_helps():
    with pytest.raises(
        UserError, match=r"img_size: got 8, expected 299, the size that inception_v3 was built for \(\w"
    ):
        checked(ModelSpec("inception_v3"), 8)
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        checked(RESNET, 0)


def test_a_model_without_a_patch_embedding_is_fed_what_it_was_built_for():
    """MaxViT's windows are of one size, which timm's data config does not follow."""
    assert checked(ModelSpec("maxvit_rmlp_pico_rw_256", {"img_size": 64}), None) == (3, 64, 64)


def test_what_cannot_be_found_out_is_let_through(monkeypatch):
    def odd(model, x):
        raise NotImplementedError("Could not run 'odd' with arguments from the 'Meta' backend")

    monkeypatch.setattr(timm.models.VisionTransformer, "forward", odd)
    assert checked(DEIT, 64) == (3, 64, 64)


def test_a_model_that_fails_at_any_size_is_not_refused_for_its_size(monkeypatch):
    """As a design of one's own that is wrong."""

    class Broken(Connection):
        title = source = "nowhere"

        def forward(self, x, F):
            return torch.nn.functional.layer_norm(None, (1,))

    monkeypatch.setitem(DESIGNS, "broken", Broken)
    spec = ModelSpec("steps_deit_tiny_patch16_224", {"residual": "broken"})
    reason = r"model: steps_deit_tiny_patch16_224 fails at its own size too: layer_norm\(\): .*not NoneType"
    with pytest.raises(UserError, match=f"^{reason}"):
        checked(spec, 64)
    for img_size in (None, "data"):
        with pytest.raises(UserError, match=f"^{reason}"):
            fit_input_size(dataclasses.replace(find_recipe("cifar10/shallow"), model=spec, img_size=img_size), 32)


@pytest.mark.parametrize("verb", ["train", "compare", "sweep"])
def test_every_verb_refuses_before_anything_is_written(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = [] if verb == "sweep" else ["baseline.args.img_size=32"]
    arguments = ["data=digits", "img_size=64", "model.args.img_size=32", "--run", "run", *given]
    assert main([verb, "digits/steps_12", *arguments]) == 2
    err = capsys.readouterr().err
    assert err == (
        "stepsnet: img_size: got 64, expected 32, the size that steps_deit_tiny_patch16_224 was built for "
        "(model.args.img_size=64 builds it for 64)\n"
    )
    assert not (tmp_path / "run").exists()


def test_a_baseline_is_looked_at_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["data=digits", "img_size=8", "baseline.args.img_size=16"]
    assert main(["compare", "digits/tiny", "--run", "run", *arguments]) == 2
    assert "(baseline.args.img_size=8 builds it for 8)" in capsys.readouterr().err
    recipe = override(find_recipe("digits/tiny"), ["img_size=8", "model.args.img_size=8", "baseline.args.img_size=8"])
    for one in (recipe, recipe.of_baseline()):
        assert checked(one.model, 8)[1:] == (8, 8)
