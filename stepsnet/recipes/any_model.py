"""A recipe for a pair that is in no table: a model of timm or transformers, and its StepsNet of about the same compute.

`stepsnet compare --model convnext_atto --data folder:PATH`, or `--model transformers:FOLDER --data text:FILE`, where
FOLDER has a ``config.json``. The settings are a starting point for a few thousand images, or a few million characters,
and not the best for any model: choose the learning rate for both (docs/your-model.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError, in_a_line
from ..files.reading import read_json
from ..settings.config import Augment, ClassificationRecipe, LanguageRecipe, ModelSpec, Recipe

__all__ = ["stepify_pair", "with_like_baseline", "with_vocabulary"]

_VOCABULARY, _TOKENS = 4096, 256
_NOT_FIELDS = ("architectures", "transformers_version", "auto_map", "torch_dtype", "dtype", "_name_or_path")
_OF_STREAM = {"stream_scale": 1.0, "residual": "plain", "residual_options": None}  # stepify options that a pair shares
_OF_ITS_TOKENIZER = ("bos_token_id", "eos_token_id", "pad_token_id")  # a new one is made from the data


def stepify_pair(name: str, data: str) -> Recipe:
    """Return a recipe with a model as baseline and the three-step StepsNet that :func:`stepsnet.stepify` makes of it.

    Raises:
        UserError: a transformers folder has no ``config.json`` that states its model type, or the values in it do not
            fit that type.
    """
    if name.startswith("transformers:"):
        return _language_pair(Path(name.removeprefix("transformers:")), data)
    name = name.removeprefix("timm:")
    return ClassificationRecipe(
        name=f"stepify/{name}",
        title=f"{name} in three steps, against {name} itself at about the same compute",
        data=data,
        model=ModelSpec("stepify", {"model": name, "steps": 3}),
        baseline=ModelSpec(name),
        epochs=50,
        batch_size=64,
        lr=1e-3,
        warmup_epochs=5,
        label_smoothing=0.1,
        # no augmentation of digits: they are too small for a random crop to keep its class
        augment=None if data == "digits" else Augment(scale=(0.35, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5),
        stream_epochs=10,
    )


def with_like_baseline(recipe: Recipe, given: Collection[str]) -> Recipe:
    """Return the pair with the StepsNet's model arguments, and the options of its stream, in the baseline too.

    Args:
        given: the keys of the recipe that the user has set; ``baseline.args`` among them are kept.

    Raises:
        UserError: the StepsNet has a stream scale in some stages and a design in all, which no baseline can have.
    """
    from ..models.stepify import OPTIONS

    model, baseline = recipe.model, recipe.baseline
    if model.name != "stepify" or baseline is None or any(key in ("baseline", "baseline.name") for key in given):
        return recipe
    prefix = "baseline.args."
    own = {key.removeprefix(prefix).partition(".")[0] for key in given if key.startswith(prefix)}
    of_model = {key: value for key, value in model.args.items() if key not in OPTIONS | {"model"} | own}
    args = {**baseline.args, **of_model}
    shared = _OF_STREAM.keys() - own
    if "residual" in own:  # another design has other options
        shared -= {"residual_options"}
    of_stream = {
        key: model.args[key]
        for key, default in _OF_STREAM.items()
        if key in shared and model.args.get(key, default) != default
    }
    if not of_stream and not own & _OF_STREAM.keys():
        return dataclasses.replace(recipe, baseline=ModelSpec(baseline.name, args))
    one_step = {"model": model.args["model"], "steps": 1, **_stages_of(model, {**of_stream, **args}), **of_stream}
    return dataclasses.replace(recipe, baseline=ModelSpec("stepify", {**one_step, **args}))


def _stages_of(model: ModelSpec, of_baseline: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``stages`` that the baseline needs to be like the StepsNet, as an argument, if it needs any.

    By default a baseline has both a stream scale and a design in all stages. A StepsNet without ``stages`` has a design
    in all stages, but the scale only in those that are in steps.
    """
    import torch

    from ..models.stepify import stages_in_steps

    if "stages" in of_baseline:
        return {}
    if model.args.get("stages") is not None:
        return {"stages": model.args["stages"]}
    if of_baseline.get("stream_scale", 1.0) == 1.0 or model.args["model"] == "causal_lm":  # which has one stage
        return {}
    with torch.device("meta"):
        stages = stages_in_steps(**model.args)
    if stages is not None and of_baseline.get("residual", "plain") != "plain":
        raise UserError(
            "model.args.stages: got none beside a stream_scale, which applies to the stages in steps, and a residual "
            f"design, which applies to all, expected stages for both, such as {stages}"
        )
    return {} if stages is None else {"stages": stages}


def with_vocabulary(recipe: Recipe) -> Recipe:
    """Return the pair with the recipe's vocabulary size in each model that leaves its own open.

    Raises:
        UserError: the recipe's tokenizer takes no size.
    """
    changes: dict[str, Any] = {}
    for key in ("model", "baseline"):
        spec = getattr(recipe, key)
        if isinstance(recipe, LanguageRecipe) and spec and spec.args.get("vocab_size", 0) is None:
            if recipe.vocab_size is None:
                got = f"got none with tokenizer={recipe.tokenizer}"
                raise UserError(f"{key}.args.vocab_size: {got}, expected the size of its vocabulary")
            changes[key] = ModelSpec(spec.name, {**spec.args, "vocab_size": recipe.vocab_size})
    return dataclasses.replace(recipe, **changes)


def _language_pair(folder: Path, data: str) -> LanguageRecipe:
    """A pair with the whole configuration in its recipe, so that a run no longer needs the folder."""
    fields = _configuration(folder)
    positions = fields.get("n_positions", fields.get("max_position_embeddings", _TOKENS))
    tokens = min(_TOKENS, positions)
    name = f"{folder.resolve().name} ({fields['model_type']})"
    return LanguageRecipe(
        name=f"stepify/{fields['model_type']}",
        title=f"{name} in three steps, against {name} itself at about the same compute",
        data=data,
        model=ModelSpec("stepify", {"model": "causal_lm", "steps": 3, "tokens": tokens, **fields}),
        baseline=ModelSpec("causal_lm", fields),
        vocab_size=_VOCABULARY,
        seq_len=tokens,
        epochs=20,
        epoch_updates=250,
        batch_size=16,
        lr=1e-3,
        warmup_epochs=1,
        stream_epochs=10,
    )


def _configuration(folder: Path) -> dict[str, Any]:
    """The fields under the library's current names: it renames those of older files, and ignores unknown ones."""
    from transformers import CONFIG_MAPPING, AutoConfig

    file = folder / "config.json"
    fields = read_json(file, "configuration", dict)
    if not isinstance(fields.get("model_type"), str):
        raise UserError(f"--model: {file} has no model_type, expected a configuration of transformers")
    if fields["model_type"] in CONFIG_MAPPING:  # a module of the recipe's may register others
        try:
            held = AutoConfig.from_pretrained(folder).to_diff_dict()
            known = {"model_type", *AutoConfig.for_model(fields["model_type"]).to_dict()}
            said = {key: value for key, value in held.items() if key in known & fields.keys()}
            derived = AutoConfig.for_model(**said).to_dict()  # another width has to derive it anew
        except Exception as error:  # whatever the library raises for values that it rejects
            raise UserError(f"--model: cannot read {file}: {in_a_line(error.__cause__ or error, 200)}") from error
        fields = said | {key: held[key] for key in known & held.keys() if held[key] != derived.get(key)}
    skipped = {*_NOT_FIELDS, *_OF_ITS_TOKENIZER}
    return {key: value for key, value in fields.items() if key not in skipped} | {"vocab_size": None}
