"""Any residual model as a StepsNet of about the same compute: its blocks at several widths, all else as it was.

Call ``stepify("convnext_atto", steps=3)``, or ``stepify(model, steps=3)`` for an existing model. A class of timm's
blocks is declared by a row of adapters_timm.py; the blocks in steps are held by a StepSequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ...errors import UserError, import_extra, in_a_line, nearest
from ...macs import OF_MODULES, on_meta
from ...plan import Profile, StepPlan
from ...residual.joining import check_named, design_of
from ..blocks import check_no_peft, is_of_transformers
from .containers import Container, find_containers
from .copies import check_copies
from .example import Example, check_example, example_of
from .in_design import put_in_design
from .plan import Match, check_plan, check_round_to, given_plans, search_plan
from .replace_blocks import build_in_steps
from .sequence import StepSequence
from .watch import reached

__all__ = ["OPTIONS", "create", "model_and_example", "stages_in_steps", "stepify"]


@torch.inference_mode(False)  # the models that it returns are to be trained
def stepify(
    model: nn.Module | str,
    steps: int = 3,
    *,
    profile: Profile = "steps",
    match: Match = "macs",
    blocks: int | None = None,
    stages: Sequence[int] | None = None,
    plan: Mapping[str, Any] | StepPlan | None = None,
    round_to: Literal["heads"] | int = "heads",
    stream_scale: float = 1.0,
    residual: str = "plain",
    residual_options: Mapping[str, Any] | None = None,
    example: Tensor | Sequence[Any] | Mapping[str, Any] | None = None,
    tokens: int = 256,
    **model_args: Any,
) -> nn.Module:
    """Turn a residual model into a StepsNet: the same class, stem, positions, norms and head, with blocks in steps.

    The given model is not changed. New blocks are initialized as the model's library does it, without the hooks of the
    old ones; all other weights are the model's. With ``steps=1`` the result is the model, weights and names included,
    except for a ``stream_scale`` or a design; the designs "fixup", "deepnorm" and "rezero" draw weights anew.

    Args:
        model: a timm model or its name, "causal_lm" with the fields of a configuration of transformers (see
            models/causal_lm.py), or any model whose body consists of containers of residual blocks of one kind.
        steps: n, the number of steps; odd for a bow-tie.
        profile: "steps" from narrow to wide, "reverse", or "bowtie", as in :func:`stepsnet.plan_steps`.
        match: the cost of a container that its new blocks have to match in total, "macs" or "params".
        blocks: the number of blocks that each container should have at the same cost; by default, three steps give
            about twice as many as before.
        stages: the stages of a hierarchical model to put in steps, counted from 1 as in Table 11; by default those with
            at least ``steps`` blocks that keep their width and resolution. The blocks of the others stay as they are.
        plan: widths, depths and optionally num_heads, in place of the search and of ``steps``, with one entry per step
            in the order of execution: ``{"widths": (96, 192), "depths": (12, 6)}``, or what
            :func:`stepsnet.plan_steps` returns. For several stages, each of these holds one such sequence per stage.
            The widest step has the model's own width and number of heads.
        round_to: "heads" rounds widths as the paper does, a number rounds them to multiples of it. With "heads", blocks
            without heads get multiples of 8, or of 4 if the model is narrower than 64.
        stream_scale: a factor for the stream where it enters each container that ``steps`` and ``stages`` choose, see
            :func:`stepsnet.describe_stepify`. ``steps=1`` with the same ``stages`` gives the original with this scale.
        residual: the design of each step's stream, a key of ``stepsnet.residual.DESIGNS``; it joins blocks as
            :func:`stepsnet.residual.connect` does, in all containers or in those of ``stages``. It is for blocks with
            channels last, and not for models of transformers.
        residual_options: the options of the design, such as ``{"streams": 4}``.
        example: a batch that the model takes, for a model from neither library: a tensor, a list of arguments, or a
            mapping of keyword arguments, with tensors of the same batch among them. Only its shapes count: those of
            one sample if the first dimension is the batch, else those of the whole example.
        tokens: the sequence length at which the compute of a model of transformers is matched.
        **model_args: arguments of the model, if it is given by name.

    Raises:
        UserError: a name that timm does not know, a model without such containers, a block without an adapter, or a
            plan or a design that does not fit; the message names the module.
    """
    _check_options(steps, match, blocks, stages, plan, round_to, stream_scale, example, tokens)
    check_named(residual, {} if residual_options is None else residual_options)
    searched = {"profile": profile != "steps", "match": match != "macs", "round_to": round_to != "heads"}
    if plan is not None and (
        beside := [*[key for key, given in searched.items() if given], *["blocks"] * bool(blocks)]
    ):
        raise UserError(
            f"{beside[0]}: got it together with a plan, which replaces the search, expected only one of them"
        )
    try:
        model, call, _ = model_and_example(model, {"example": example, "tokens": tokens, **model_args})
    except UserError as error:
        for key, value in model_args.items():
            if key in getattr(design_of(residual), "options", {}) and key in str(error):
                hint = f"(for an option of the design: residual_options={{{key!r}: {value!r}}})"
                raise UserError(f"{error} {hint}") from error
        raise
    is_transformer = is_of_transformers(model)
    if is_transformer:
        from .of_transformers import in_steps, layers_of_transformer

        found = [layers_of_transformer(model, call)]
        if residual != "plain":
            config: Any = model.config
            ours = ", or steps_transformer with a design" * (config.model_type == "llama")
            raise UserError(
                f"residual: got {residual!r} for {type(model).__name__}, expected plain: for models of "
                f"transformers use stepsnet.residual.connect(model.{found[0].path}, …){ours}"
            )
    else:
        found = find_containers(model, call)
    chosen = _chosen(found, steps, stages, plan is not None)
    _check_sizes(chosen)
    if plan is None:
        plans = {one.path: search_plan(one, steps, profile, match, blocks, round_to) for one in chosen}
    else:
        plans = given_plans(plan, chosen)
    replaced = [one for one in chosen if not plans[one.path].is_of(one)]
    if repeated := [one for one in chosen if one.passes > 1 and stream_scale != 1.0]:
        raise UserError(
            f"stream_scale: got {stream_scale}, but {type(model).__name__} runs {repeated[0].path} "
            f"{repeated[0].passes} times, and its stream would be multiplied each time; expected 1"
        )
    _check_taps(model, replaced)
    _check_ties(model, replaced)
    if is_transformer:
        return in_steps(model, found[0], plans[found[0].path], stream_scale)
    result = build_in_steps(model, found, plans, stream_scale)
    joined = found if stages is None else chosen
    put_in_design(result, found, {one.path for one in joined}, residual, residual_options or {})
    _check_that_it_runs(result, call)
    return result


def _check_options(
    steps: Any,
    match: Any,
    blocks: Any,
    stages: Any,
    plan: Any,
    round_to: Any,
    stream_scale: Any,
    example: Any,
    tokens: Any,
) -> None:
    """Raises UserError for the first option of :func:`stepify` that has the wrong type or is out of bounds."""
    check_round_to(round_to)
    for name, value in {"steps": steps, "blocks": blocks, "tokens": tokens}.items():
        if name == "blocks" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name}: got {repr(value)[:40]}, expected a whole number of at least 1")
    if match not in get_args(Match):
        raise UserError(f"match: got {match!r}, expected {' or '.join(get_args(Match))}")
    if stages is not None and (isinstance(stages, str) or not isinstance(stages, Sequence)):
        raise UserError(f"stages: got {stages!r}, expected a list of numbers, counted from 1")
    if wrong := [stage for stage in stages or () if not isinstance(stage, int)]:
        raise UserError(f"stages: got {wrong[0]!r} in the list, expected only whole numbers, counted from 1")
    check_plan(plan)
    is_number = isinstance(stream_scale, (int, float)) and not isinstance(stream_scale, bool)
    if not is_number or not 1e-6 <= stream_scale <= 1e6:
        raise UserError(f"stream_scale: got {stream_scale!r}, expected a number from 1e-6 to 1e6")
    check_example(example)


OPTIONS = frozenset(inspect.signature(stepify).parameters) - {"model", "model_args"}


def create(**kwargs: Any) -> nn.Module:
    """:func:`stepify` for a :class:`.ModelSpec`: ``{"name": "stepify", "args": {"model": NAME, …}}``.

    Raises:
        ValueError: ``model`` is missing or not a name.
        UserError: as :func:`stepify`.
    """
    if not isinstance(kwargs.get("model"), str):
        raise ValueError(f"args.model: got {kwargs.get('model')!r}, expected the name of a timm model, or causal_lm")
    return stepify(**kwargs)


def model_and_example(model: nn.Module | str, options: Mapping[str, Any]) -> tuple[nn.Module, Example, dict[str, Any]]:
    """The model, built if a name is given, its example, and the options of :func:`stepify` without the model's own.

    Raises:
        UserError: an unknown name, or options that are neither stepify's nor, if a name is given, the model's.
    """
    own = {key: value for key, value in options.items() if key not in OPTIONS}
    options = {key: value for key, value in options.items() if key in OPTIONS}
    if isinstance(model, str):
        model = _named(model, own)
    elif not isinstance(model, nn.Module):
        raise UserError(f"stepify: got {str(model)[:40]!r}, expected a model, or the name of one")
    elif own:
        raise UserError(f"stepify: got {', '.join(own)} with a built model, expected such arguments only with a name")
    if isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
        raise UserError(
            f"stepify: got a compiled {type(compiled).__name__}, expected the model as it was before torch.compile"
        )
    check_no_peft(model, "stepify")
    check_copies(model)
    if is_of_transformers(model):
        from ..build import context_of
        from .of_transformers import token_example

        if options.get("example") is not None:
            raise UserError(f"example: got one for {type(model).__name__}, expected tokens=, the sequence length")
        tokens = options.get("tokens", 256)
        return model, token_example(model, min(tokens, context_of(model) or tokens)), options
    return model, example_of(model, options.get("example")), options


@torch.inference_mode(False)  # inference tensors have no version counters, which BlockUses compares
def stages_in_steps(model: nn.Module | str, steps: int = 3, **options: Any) -> list[int] | None:
    """The stages that :func:`stepify` puts in steps with these arguments; None if they are all that it finds.

    ``stepify(model, 1, stages=…, stream_scale=…)`` with these stages is the original with the same scale; without them
    it would have the scale in all stages.

    Raises:
        UserError: as stepify.
    """
    model, call, options = model_and_example(model, options)
    if is_of_transformers(model):
        return None
    stages, plan = options.get("stages"), options.get("plan")
    _check_options(steps, "macs", None, stages, plan, "heads", 1.0, None, 1)
    found = find_containers(model, call)
    chosen = _chosen(found, steps, stages, plan is not None)
    return [one.stage for one in chosen] if len(chosen) < len(found) else None


def _check_sizes(chosen: Sequence[Container]) -> None:
    """Raises UserError for a block that has a tensor without a role in its adapter, or more heads than channels."""
    for one in chosen:
        try:
            heads = one.adapter.num_heads(one.template)
        except UserError as error:
            raise UserError(f"stepify: {one.path}: {error}") from error
        if heads is not None and heads > one.width:
            raise UserError(
                f"stepify: {one.path or 'the model'}: got {heads} heads in blocks of width {one.width}, expected at "
                f"most as many; the channels are taken to be in dimension {one.dim}, dim= of register_block "
                "sets another"
            )


def _check_taps(model: nn.Module, replaced: Sequence[Container]) -> None:
    """Raises UserError if the model reads its stream after some of its blocks, which in steps are other places."""
    for one in replaced:
        if one.read_behind and len(one.read_behind) < len(one.blocks) - 1 - one.lead:
            places = ", ".join(map(str, one.read_behind[:4])) + ", …" * (len(one.read_behind) > 4)
            getter = hasattr(model, "out_indices") and hasattr(getattr(model, "model", None), "forward_intermediates")
            raise UserError(
                f"stepify: {type(model).__name__} reads its stream after some blocks of {one.path} ({places}), which "
                "are other places in steps; expected a model that reads it after the last block, or after each"
                f"{'; or stepify the model without features_only, and call its forward_intermediates' * getter}"
            )


def _check_ties(model: nn.Module, replaced: Sequence[Container]) -> None:
    """Raises UserError if a part outside the blocks shares a parameter with them: new blocks would not share it."""
    for one in replaced:
        inside = {parameter: path for path, parameter in nn.ModuleList(one.blocks[one.lead :]).named_parameters()}
        within = f"{one.path}." if one.path else ""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter in inside and not name.startswith(within):
                raise UserError(
                    f"stepify: {type(model).__name__}.{name} is also a parameter of the blocks in {one.path}, expected "
                    "blocks with weights of their own"
                )


def _check_that_it_runs(result: nn.Module, call: Example) -> None:
    """Run the result without data; raises UserError if it fails, or makes no use of some blocks.

    A part outside of the blocks may hold something for each block or head, as some positions do, and a model may run
    only as many blocks as it was made with.
    """
    traced = on_meta(result)
    for copied, parameter in zip(traced.parameters(), result.parameters()):
        copied.requires_grad_(parameter.requires_grad)  # a model may write into a frozen one
    sequences = [(path, module) for path, module in traced.named_modules() if isinstance(module, StepSequence)]
    called: set[nn.Module] = set()
    try:
        with ExitStack() as stack:
            for block in (block for _, sequence in sequences for block in sequence.blocks):
                stack.callback(block.register_forward_hook(lambda block, *_: called.add(block)).remove)
            stack.enter_context(torch.enable_grad())
            outputs = traced(*call.args, **(call.kwargs or {}))
    except OF_MODULES as error:
        reason = in_a_line(error)[:200]
        raise UserError(
            f"stepify: {type(result).__name__} does not run with its blocks in steps, since a part of it is made for "
            f"its old number of blocks or heads ({reason})"
        ) from error
    used = reached(traced, outputs)
    for path, sequence in sequences:
        _check_blocks(
            result, path, [block in called for block in sequence.blocks], "never runs", "runs only as many as it had"
        )
        trained = [{one for one in block.parameters() if one.requires_grad} for block in sequence.blocks]
        if any(used & some for some in trained):  # else it computes without gradients
            has_use = [not some or bool(used & some) for some in trained]
            _check_blocks(result, path, has_use, "makes no use of", "reads its stream where it did")


def _check_blocks(model: nn.Module, path: str, fit: Sequence[bool], what: str, since: str) -> None:
    """Raises UserError if some blocks do not fit."""
    if wrong := [i for i, fits in enumerate(fit) if not fits]:
        blocks = f"{path}.{wrong[0]}" + (f" to {path}.{wrong[-1]}" if len(wrong) > 1 else "")
        raise UserError(
            f"stepify: {type(model).__name__} {what} {blocks} of its {len(fit)} blocks: it {since} before, "
            f"expected a loop over all blocks of {path}"
        )


def _named(name: str, args: dict[str, Any]) -> nn.Module:
    import timm

    if name.startswith("transformers:"):
        from .of_transformers import model_of_name

        return model_of_name(name.removeprefix("transformers:"), args)
    import_extra("pydantic", "model")  # only a model given by name needs it
    from ..build import is_elsewhere

    name = name.removeprefix("timm:")
    if name != "causal_lm" and not timm.is_model(name) and not is_elsewhere(name):
        near = nearest(name, timm.list_models())
        other = "NAME" if near else name
        raise UserError(f"model: got {name!r}, expected a timm model, causal_lm or transformers:{other}{near}")
    from ...settings.config import ModelSpec
    from ..build import build_model

    return build_model(ModelSpec(name, args))


def _chosen(found: list[Container], steps: int, stages: Sequence[int] | None, is_planned: bool) -> list[Container]:
    if stages is None:
        chosen = [one for one in found if one.depth >= steps] if len(found) > 1 and not is_planned else found
        if not chosen:
            depths = ", ".join(str(one.depth) for one in found)
            raise UserError(
                f"steps: got {steps}, expected at most the blocks of the deepest stage; the stages have {depths}"
            )
        return chosen
    by_stage = {one.stage: one for one in found}
    if not by_stage.keys() >= set(stages) or len(set(stages)) != len(stages) or not stages:
        there = ", ".join(map(str, by_stage))
        raise UserError(f"stages: got {tuple(stages)}, expected some of {there}, the stages with blocks of one kind")
    return [by_stage[stage] for stage in sorted(stages)]
