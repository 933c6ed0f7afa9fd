"""Every setting of every recipe type takes what its declaration allows, and says of all else what is wrong, in a line.

Values and bounds come from the declarations, so that a new field is covered without a new test.
"""

import dataclasses
import json

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from line_fits import SETTINGS, fit

from stepsnet.engine.optim import rate_at
from stepsnet.errors import UserError
from stepsnet.models.build import build_model
from stepsnet.recipes import RECIPES
from stepsnet.runs.advice import check_settings, on_settings
from stepsnet.settings.config import RECIPE_TYPES, ModelSpec, Recipe, TrainingSettings
from stepsnet.settings.overrides import override, read_recipe, to_plain, to_yaml

BASES = {recipe.task: recipe for recipe in RECIPES.values()}
SCHEMAS = {task: pydantic.TypeAdapter(kind).json_schema() for task, kind in RECIPE_TYPES.items()}


def inside(schema, whole, key):
    """(key, schema) of a setting and of those within it."""
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].split("/")[-1]]
    yield key, schema
    for name, one in schema.get("properties", {}).items():
        yield from inside(one, whole, f"{key}.{name}" if key else name)
    members = [schema.get("items"), schema.get("additionalProperties"), *schema.get("prefixItems", [])]
    for one in (*members, *schema.get("anyOf", [])):
        if isinstance(one, dict):
            yield from inside(one, whole, key)


SETTINGS_OF = {task: list(inside(schema, schema, "")) for task, schema in SCHEMAS.items()}
KEYS = sorted({(task, key) for task, found in SETTINGS_OF.items() for key, _ in found if key and "import" not in key})
NUMBERS = [0, 1, -1, 2, 0.5, -0.5, 1e-300, 1e38, 1e308, -1e308, 2**31, 2**63, -(2**63), 10**30, 1000000]
SCALARS = st.one_of(
    st.sampled_from(NUMBERS),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
    st.text(max_size=8),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
)


@given(key=st.sampled_from(KEYS), value=VALUES)
@settings(max_examples=800, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_value_of_any_key_is_taken_as_it_is_or_refused_in_a_line(key, value, tmp_path):
    task, name = key
    try:
        changed = override(BASES[task], [f"{name}={json.dumps(value)}"])
    except UserError as error:
        assert len(str(error).splitlines()) == 1
        assert name.partition(".")[0] in str(error) or "parent" in str(error)
        return
    got = to_plain(changed)
    for part in name.split("."):
        got = got[part]
    if not isinstance(value, dict):  # of which the rest has its defaults
        assert got == value
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(changed), encoding="utf-8")
    assert to_plain(read_recipe(file)) == to_plain(changed)


def test_every_number_has_its_bounds():
    for task, found in SETTINGS_OF.items():
        for key, schema in found:
            if schema.get("type") in ("integer", "number") and not key.startswith("expected"):
                assert {"minimum", "exclusiveMinimum"} & schema.keys(), f"{task}: {key} has no least value"
                assert {"maximum", "exclusiveMaximum"} & schema.keys(), f"{task}: {key} has no greatest value"


def extremes(schema):
    """The values at the bounds of a number, and just inside of those that are excluded."""
    whole = schema.get("type") == "integer"
    tiny = 1 if whole else 1e-12
    for name, sign in (("minimum", 0), ("exclusiveMinimum", 1), ("maximum", 0), ("exclusiveMaximum", -1)):
        if name in schema:
            yield schema[name] + sign * tiny
    if "enum" in schema:
        yield from schema["enum"]


# a training of so many epochs would not end here, and these need more than a line to be fitted
ENDLESS = {"epochs", "earlier_epochs", "batch_size", "accumulation_steps", "compile", "tracker", "parallel"}
EXTREME = sorted(
    {
        (key, value)
        for key, schema in inside(*[pydantic.TypeAdapter(TrainingSettings).json_schema()] * 2, "")
        if key and key not in ENDLESS and (schema.get("type") in ("integer", "number") or "enum" in schema)
        for value in extremes(schema)
    },
    key=str,
)


@pytest.mark.parametrize("key, value", EXTREME)
def test_what_a_declaration_allows_trains_or_is_refused_in_a_line(key, value, tmp_path):
    kind = {"betas": (value, value), "milestones": (value,), "grad_checkpointing": value}.get(key, value)
    if key == "grad_checkpointing":
        kind = float(value) if value <= 1 else (value,)
    try:
        chosen = dataclasses.replace(SETTINGS, **{key: kind})
        check_settings(dataclasses.replace(BASES["classification"], **dataclasses.asdict(chosen)))
        _, metrics, _ = fit(tmp_path, settings=chosen)
    except UserError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert metrics is not None


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"min_lr": 1.0}, "min_lr: got 1, expected at most lr, 0.001"),
        ({"lr": 0.0}, "warmup_lr: got 5e-07, expected at most lr, 0"),
        ({"warmup_lr": 1.0}, "warmup_lr: got 1, expected at most lr, 0.001"),
        ({"opt": "adahessian"}, "opt: got 'adahessian', expected an optimizer that needs no second derivatives"),
        ({"opt": "fusedadam"}, "opt: fusedadam does not take these settings: CUDA required"),
        ({"img_size": 60000}, "img_size and batch_size: 1024 × 10,800,000,000 numbers take 41,199 GiB, expected at"),
    ],
)
def test_settings_with_which_no_training_begins(changes, expected):
    recipe = dataclasses.replace(BASES["classification"], **{"lr": 1e-3, "batch_size": 1024, **changes})
    with pytest.raises(UserError, match=expected):
        check_settings(recipe)


def test_sizes_that_are_no_numbers_are_left_to_the_model():
    recipe = BASES["detection"]
    for args in ({"size": None}, {"max_size": "long"}):
        of_model = dataclasses.replace(recipe.model, args={**recipe.model.args, **args})
        assert dataclasses.replace(recipe, model=of_model, augment=None).sizes_in_memory(2) == []


def test_milestones_that_never_come_are_told():
    recipe = dataclasses.replace(BASES["classification"], sched="multistep", milestones=(400,), epochs=300)
    assert "without milestones before epoch 300: the learning rate stays at lr" in " ".join(on_settings(recipe))


def test_every_field_says_what_it_is():
    for field in dataclasses.fields(Recipe):
        assert Recipe.__pydantic_fields__[field.name].description, field.name


@pytest.mark.parametrize(
    "name, args, expected",
    [
        (
            "vit_tiny_patch16_224",
            {"norm_layer": "foo"},
            r"model vit_tiny_patch16_224: KeyError: 'foo' \(norm_layer='foo'\)",
        ),
        ("vit_tiny_patch16_224", {"num_classes": 1e3}, "num_classes: got 1000.0, expected a whole number"),
        ("vit_tiny_patch16_224", {"in_chans": "x"}, "in_chans: got x, expected a whole number"),
        ("vit_tiny_patch16_224", {"patch_size": 0}, "patch_size: got 0, expected at least 1"),
        ("vit_tiny_patch16_224", {"drop_path_rate": 7}, "drop_path_rate: got 7, expected at least 0 and less than 1"),
        ("vit_tiny_patch16_224", {"class_token": "no"}, "class_token: got no, expected true or false"),
        ("vit_tiny_patch16_224", {"features_only": True}, "features_only: got True, expected none: detectors and"),
        ("vit_tiny_patch16_224", {"checkpoint_path": "x"}, "checkpoint_path: got x, expected none: init=FILE reads"),
        ("vit_tiny_patch16_224", {"depth": 10**9}, "depth: got 1000000000, expected 1 to 10,000 blocks"),
        ("steps_deit_tiny_patch16_224", {"depths": [0, 0, 0]}, r"depths: got \[0, 0, 0\], expected 1 to 10,000 blocks"),
        ("steps_deit_tiny_patch16_224", {"qk_norm": "x"}, "qk_norm: got x, expected true or false"),
        ("steps_deit_tiny_patch16_224", {"widths": [2**30], "depths": [1]}, "widths: got 1,073,741,824, expected at"),
        ("vit_tiny_patch16_224", {"embed_dim": 3 * 2**18}, "its weights take .* GiB, expected at most the"),
        ("faster_rcnn", {"backbone": "resnet18", "max_size": 1}, "got 800 and 1, expected 16 <= size <= max_size"),
        (
            "steps_transformer",
            {"widths": [8], "depths": [1], "attention_dropout": 5},
            "attention_dropout: got 5, expected",
        ),
    ],
)
def test_arguments_that_no_model_takes(name, args, expected):
    with pytest.raises(UserError, match=expected) as raised:
        build_model(ModelSpec(name, args))
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("sched", ["cosine", "poly"])
def test_a_schedule_of_one_update_is_built_in_silence(sched, caplog):
    rate_at(TrainingSettings(sched=sched, epochs=1, warmup_epochs=0, lr=1e-3), 0, 1)
    assert not caplog.records
