"""Masked channels and dropped blocks: what is taken out is what the tables say, and it comes back."""

import copy

import pytest
import timm
import torch
import transformers
from residual_networks import STEPS, deit
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import stepsnet
from stepsnet.analysis.interventions import drop_each, drop_steps, dropped, mask_paths, masked
from stepsnet.errors import UserError
from stepsnet.models.blocks import blocks_of, recompute_blocks
from stepsnet.models.steps_transformer import create


@pytest.fixture
def model():
    torch.manual_seed(0)
    kwargs = {"widths": (24, 34, 48), "depths": (6, 3, 2), "num_heads": (2, 2, 3), "img_size": 32}
    return timm.create_model("test_steps_deit", **kwargs).eval()


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def evaluation(images):
    return lambda model: {"top1": model(images).sum().item()}


@pytest.mark.parametrize(("path", "zeroed"), [("slow", slice(0, 8)), ("fast", slice(40, 48))])
def test_the_channels_of_the_paths_are_set_to_zero(model, images, path, zeroed):
    expected_input = []
    handle = model.blocks.register_forward_pre_hook(lambda module, arguments: expected_input.append(arguments[0]))
    before = model(images)
    x = expected_input[0].clone()
    x[..., zeroed] = 0
    handle.remove()
    with masked(model, 1 / 3, path):
        got = model(images)
    again = model.forward_head(model.norm(model.blocks(x)))
    torch.testing.assert_close(got, again)
    assert not torch.equal(got, before) and torch.equal(model(images), before)


def test_table_6_has_both_paths_and_one_unmasked(model, images):
    rows = mask_paths(model, evaluation(images))
    assert [(row["path"], row["channels"]) for row in rows] == [
        *(("slow", n) for n in range(0, 24, 4)),
        *(("fast", n) for n in range(0, 24, 4)),
    ]
    assert rows[0]["metrics"] == rows[6]["metrics"] == evaluation(images)(model)
    assert len({row["metrics"]["top1"] for row in rows}) == 11


def test_compiled_code_does_not_hide_what_is_taken_out(model, images):
    evaluate = evaluation(images)
    with torch.no_grad():
        expected = [drop_steps(model, evaluate), mask_paths(model, evaluate), drop_each(model, evaluate)]
        model.compile(backend="eager")
        before = evaluate(model)
        assert [drop_steps(model, evaluate), mask_paths(model, evaluate), drop_each(model, evaluate)] == expected
        assert evaluate(model) == before


def test_a_dropped_block_has_its_own_forward_pass_again():
    """Such as one that recomputes it, which had been lost where a design joins the blocks."""
    model = deit("mhc", **STEPS)
    blocks = blocks_of(model)
    recompute_blocks(blocks)
    own = [block.forward for block in blocks]
    with dropped(blocks[1:]):
        assert blocks[0].forward is own[0] and blocks[1].forward is not own[1]
    assert [block.forward for block in blocks] == own


def test_layers_that_do_not_run_are_not_dropped():
    torch.manual_seed(0)
    model = create(widths=(32, 48, 64), depths=(2, 1, 2), num_attention_heads=(2, 3, 4), vocab_size=61).eval()
    model.config.num_hidden_layers = 3
    ids = torch.arange(8)[None]
    rows = drop_steps(model, lambda model: {"loss": model(ids).logits.sum().item()})
    assert [row["blocks"] for row in rows[1:]] == [[0, 1], [2]] and len({row["metrics"]["loss"] for row in rows}) == 3


def test_channels_that_do_not_wait_are_not_said_to_be_masked(images):
    kwargs = {"widths": (24, 34), "depths": (2, 2), "num_heads": (2, 2), "img_size": 32}
    model = timm.create_model("test_steps_deit", **kwargs).eval()
    seen = []

    def evaluate(model):
        hook = model.blocks.register_forward_hook(
            lambda module, x, y: seen.append((x[0] == 0).all((0, 1)).sum().item())
        )
        metrics = evaluation(images)(model)
        hook.remove()
        return metrics

    rows = mask_paths(model, evaluate)
    assert [row["channels"] for row in rows] == [0, 4, 8, 12, 16, 20, 0, 4, 8, 10]  # 10 wait
    assert seen == [0, 4, 8, 12, 16, 20, 4, 8, 10]  # what is masked beside 0 twice


def test_stages_have_numbers_of_their_own():
    model = timm.create_model("test_steps_swin").eval()
    x = torch.randn(1, *model.default_cfg["input_size"])
    several = [s.widths for s in model.modules() if type(s).__name__ == "StepsNet" and len(s.widths) > 1]
    row = mask_paths(model, evaluation(x), parts=2)[1]
    assert row["channels"] == ", ".join(str(round(min(widths) / 2)) for widths in several) and len(several) > 1


def test_table_7_drops_similar_computations(model, images):
    rows = drop_steps(model, evaluation(images))
    assert [row["dropped"] for row in rows] == [
        "nothing",
        "last 4 of width 24",
        "last 2 of width 34",
        "last 1 of width 48",
    ]
    assert [row["blocks"] for row in rows] == [[], [2, 3, 4, 5], [7, 8], [10]]
    for row in rows:
        without = copy.deepcopy(model)
        for index in row["blocks"]:
            block = blocks_of(without)[index]
            for branch in (block.attn.proj, block.mlp.fc2):  # a block whose branches end in zero passes its input on
                nn.init.zeros_(branch.weight)
                nn.init.zeros_(branch.bias)
        assert row["metrics"]["top1"] == pytest.approx(evaluation(images)(without)["top1"], rel=1e-4)


def test_steps_of_several_stages_are_told_apart():
    """The stages' widths are those of test_steps_swin; a step that is too short is dropped whole, and says so."""
    rows = drop_steps(timm.create_model("test_steps_swin").eval(), lambda model: {})
    assert [(row["dropped"], row["blocks"]) for row in rows[1:]] == [
        ("last 2 of width 32 of stage 3 (4 would be as large as the largest block)", [2, 3]),
        ("last 1 of width 48 of stage 3 (2 would be as large as the largest block)", [4]),
        ("last 1 of width 64 of stage 3", [5]),
        ("last 1 of width 64 of stage 4", [7]),
    ]


def test_what_leads_into_a_stage_is_no_step_of_it(images):
    plain = timm.create_model("resnet18", layers=(1, 6, 1, 1), num_classes=5)
    model = stepsnet.stepify(plain, 2).eval()  # the second stage: a block that halves the resolution, and two steps
    rows = drop_steps(model, evaluation(images))
    assert [row["dropped"].split(" of ")[1] for row in rows[1:]] == ["width 88", "width 128"]
    assert all(min(row["blocks"]) > 1 for row in rows[1:])


def test_steps_of_one_width_are_dropped_apart(images):
    shape = {"widths": (48, 24, 48), "depths": (2, 5, 3), "num_heads": (2, 1, 2)}
    model = timm.create_model("test_steps_deit", img_size=32, **shape).eval()
    rows = drop_steps(model, evaluation(images))
    assert [(row["dropped"], row["blocks"]) for row in rows[1:]] == [
        ("last 1 of width 48 in step 1", [1]),
        ("last 4 of width 24", [3, 4, 5, 6]),
        ("last 1 of width 48 in step 3", [9]),
    ]


def test_each_block_is_dropped_alone_and_put_back(model, images):
    before = model(images)
    rows = drop_each(model, evaluation(images))
    assert [row["width"] for row in rows] == [24] * 6 + [34] * 3 + [48] * 2
    with dropped([blocks_of(model)[4]]):
        assert rows[4]["metrics"] == evaluation(images)(model)
    assert torch.equal(model(images), before)
    assert not any("forward" in block.__dict__ for block in blocks_of(model))  # which would hide a design's, or its own


def test_a_block_that_changes_the_shape_is_left_in_its_place():
    model, x = timm.create_model("resnet18", num_classes=5).eval(), torch.randn(2, 3, 64, 64)
    rows = drop_each(model, lambda model: {"sum": model(x).sum().item()})
    reshaping = [block.downsample is not None for block in blocks_of(model)]
    assert [not row["metrics"] for row in rows] == reshaping and 0 < sum(reshaping) < len(rows)


@torch.no_grad()
def test_a_layer_with_several_outputs_gives_its_input_as_the_first():
    config = transformers.BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=20)
    model = transformers.BloomForCausalLM(config).eval()
    ids = torch.arange(8)[None]
    rows = drop_each(model, lambda model: {"sum": model(ids, use_cache=False).logits.sum().item()})
    trained = copy.deepcopy(model.state_dict())
    for layer, row in zip(model.transformer.h, rows):
        for branch in (layer.self_attention.dense, layer.mlp.dense_4h_to_h):
            nn.init.zeros_(branch.weight)
            nn.init.zeros_(branch.bias)
        assert row["metrics"]["sum"] == pytest.approx(model(ids, use_cache=False).logits.sum().item(), abs=1e-3)
        model.load_state_dict(trained)


def test_a_forward_pass_of_a_blocks_own_comes_back(model, images):
    block, calls = blocks_of(model)[1], []
    before = model(images)
    block.forward = own = lambda x, own=block.forward: calls.append(1) or own(x)
    with dropped([block]):
        assert not torch.equal(model(images), before)
    assert torch.equal(model(images), before) and block.forward is own and len(calls) == 2
    message = "the forward pass of this Block has been replaced, as by compiling or checkpointing the block"
    with pytest.raises(UserError, match=message):
        stepsnet.residual.connect([block], "mhc", width=24)


def test_a_dropped_first_layer_leaves_the_scale_of_the_stream(images):
    """Of transformers' models the first layer scales the stream, which is not what it adds to it."""
    config = GPT2Config(vocab_size=31, n_embd=32, n_layer=4, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    ours = stepsnet.stepify(GPT2LMHeadModel(config), 2, stream_scale=30.0).eval()
    ids = torch.arange(2, 20)[None]
    with dropped(blocks_of(ours)[:1]):
        without = ours(ids).logits
    silent = copy.deepcopy(ours)
    for layer in (blocks_of(silent)[0].attn.c_proj, blocks_of(silent)[0].mlp.c_proj):
        nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)
    torch.testing.assert_close(without, silent(ids).logits)
    assert not torch.allclose(without, ours(ids).logits)


def test_stages_are_taken_one_by_one():
    model = timm.create_model("test_steps_swin").eval()
    images = torch.randn(1, *model.default_cfg["input_size"])
    rows = drop_steps(model, evaluation(images))
    several = [s for s in model.modules() if type(s).__name__ == "StepsNet" and len(s.widths) > 1]
    assert len(rows) == 1 + sum(len([n for n in s.networks if len(n)]) for s in several)


def test_a_language_model_is_taken_apart_alike():
    model = create(widths=(16, 24), depths=(2, 1), num_attention_heads=(2, 2), vocab_size=30).eval()
    ids = torch.arange(8)[None]

    def evaluate(model):
        return {"loss": model(ids, labels=ids).loss.item()}

    rows = mask_paths(model, evaluate)
    assert len({row["metrics"]["loss"] for row in rows}) > 6
    assert [row["blocks"] for row in drop_steps(model, evaluate)] == [[], [0, 1], [2]]


def test_a_model_that_loops_over_its_blocks_is_masked_as_one_that_calls_them():
    torch.manual_seed(0)
    model = stepsnet.stepify("eva02_tiny_patch14_224", 3, img_size=28, depth=4, embed_dim=96, num_heads=3).eval()
    x, seen = torch.randn(2, 3, 28, 28), []
    begin = model.blocks._begin_stream
    model.blocks._begin_stream = lambda z: seen.append((z, begin(z))) or seen[-1][1]
    narrow = min(model.blocks.widths)
    for path, zeros in (("slow", range(narrow // 2)), ("fast", range(96 - narrow // 2, 96))):
        with masked(model, 0.5, path):
            model(x)
        z, masked_z = seen.pop()
        expected = z.clone()
        expected[..., list(zeros)] = 0
        assert torch.equal(masked_z, expected) and z.abs().min() > 0
    model, x = model.double(), x.double()  # float32 may round two of the losses to one
    losses = [
        row["metrics"]["loss"] for row in mask_paths(model, lambda model: {"loss": model(x).square().sum().item()})
    ]
    assert len(set(losses)) == len(losses) - 1  # both paths begin with no channel masked


@pytest.mark.parametrize("args", [{}, {"widths": ((16,), (32,), (64,), (128,)), "depths": ((2,), (2,), (2,), (2,))}])
def test_a_residual_network_has_no_paths(images, args):
    """Also one of stages, each wider than the one before."""
    model = timm.create_model("test_steps_swin" if args else "test_vit", **args).eval()
    for analyze in (mask_paths, drop_steps):
        with pytest.raises(UserError, match="expected a StepsNet of several"):
            analyze(model, evaluation(images))
