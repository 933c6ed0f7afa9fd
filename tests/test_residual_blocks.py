"""Designs around the blocks of any declared family: what is declared once, for stepify, serves here too."""

import copy
import io
import math
import pickle
import re
from functools import partial

import pytest
import timm
import torch
from residual_networks import JOINED, stirred, vit
from timm.layers import GluMlp, SwiGLU, SwiGLUPacked
from timm.models.vision_transformer import Block
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaModel,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer, GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import stepsnet
from stepsnet.errors import UserError
from stepsnet.models.blocks import blocks_of
from stepsnet.residual import BranchParts, connect, declare_branches, known_blocks
from stepsnet.residual.branches import BoundBranch

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_a_copy_of_compiled_blocks_has_weights_of_its_own():
    model = vit()
    model.blocks = stirred(connect(model.blocks, "layer_scale"))
    for block in blocks_of(model):
        block.compile(backend="eager")
    pickle.dumps(model)
    copied, expected = copy.deepcopy(model), model(IMAGES)
    torch.testing.assert_close(copied(IMAGES), expected)
    stirred(model, seed=2)
    torch.testing.assert_close(copied(IMAGES), expected)


def test_attributes_of_a_connected_block_are_the_modules():
    model = vit()
    model.blocks = connect(model.blocks, "mhc")
    model.blocks[0].drop_path1 = nn.Dropout(0.5)
    for block in model.blocks:
        block.note = "read"
    assert type(blocks_of(model)[0].drop_path1) is nn.Dropout and model.blocks[2].note == "read"


def test_the_block_of_what_a_loop_gives_is_the_module_in_every_container():
    model, again = vit(), vit()
    model.blocks = connect(model.blocks, "mhc")
    sizes = {"widths": (16, 32), "depths": (2, 1), "num_heads": (2, 2), "img_size": 32}
    in_steps = timm.create_model("test_steps_deit", residual="mhc", **sizes)
    again = stepsnet.stepify(again, plan={"widths": (16, 32), "depths": (2, 1)}, residual="mhc")
    for one in (model, in_steps, again):
        assert [block.block for block in one.blocks] == blocks_of(one)
        assert nn.Sequential(one.blocks[-1].block)[0] in {*one.modules()}


@pytest.mark.parametrize("name", JOINED)
def test_a_connected_model_is_saved_whole(name):
    model = vit()
    model.blocks = connect(model.blocks, name)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for again in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        torch.testing.assert_close(again(IMAGES), model(IMAGES), rtol=0, atol=0)
        assert again.blocks[0].block is not model.blocks[0].block
        assert again.blocks.wiring is again.blocks.blocks[0].wiring


@pytest.mark.parametrize("family", ["eva02_tiny_patch14_224", "beit_base_patch16_224"])
def test_the_declared_branches_of_other_families_are_joined(family):
    """DenseFormer begins as the plain network; the others take the norms, which are declared by paths."""
    plain = vit(family)
    for block in plain.blocks:
        block.gamma_1 = block.gamma_2 = None  # ReZero has a scale of its own
    for parameter in plain.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.15)
    outputs = {}
    for name in ("dense_former", "layer_norm_scaling", "peri_ln", "rezero"):
        model = copy.deepcopy(plain)
        model.blocks = connect(model.blocks, name)  # these models loop over their blocks
        with torch.no_grad():
            outputs[name] = model(IMAGES)
        norms = [type(block.norm1) is nn.Identity for block in model.blocks.blocks]
        assert all(norms) if name == "rezero" else not any(norms)
    expected = plain(IMAGES)
    torch.testing.assert_close(outputs.pop("dense_former"), expected, rtol=1e-4, atol=1e-5)
    for name, found in outputs.items():
        assert found.isfinite().all() and not torch.allclose(found, expected), name


@pytest.mark.parametrize("name", ["dense_former", "value_residual", "mhc", "layer_norm_scaling"])
def test_gpt2_generates_in_a_design(name):
    """Its model gives masks and the cache to its layers by position."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=67, n_embd=32, n_layer=3, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2)
    model = GPT2LMHeadModel(config).eval()
    ids = torch.randint(3, 67, (1, 6))
    plain = model(ids).logits
    model.transformer.h = connect(model.transformer.h, name)
    if name == "dense_former":  # begins as the plain network
        torch.testing.assert_close(model(ids).logits, plain, rtol=1e-4, atol=1e-5)
    found = [model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=use, pad_token_id=0) for use in (1, 0)]
    assert torch.equal(*found) and found[0].shape == (1, 11)


def test_a_language_model_that_is_joined_by_hand_is_compiled_as_one_graph():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=67, **sizes))
    model.model.layers = connect(model.model.layers, "dense_former")
    stirred(model.model.layers, 0.1)
    ids = torch.randint(67, (1, 6))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


class Scaled(nn.Module):
    """A block whose branches are an activation alone, and a parameter in front of a layer."""

    def __init__(self, width):
        super().__init__()
        self.act, self.gain, self.fc = nn.PReLU(width), nn.Parameter(torch.full((width,), 0.5)), nn.Linear(width, width)

    def forward(self, x):
        x = x + self.act(x)
        return x + self.fc(self.gain * x)


def test_branches_without_a_norm_are_joined():
    blocks, x = [Scaled(7) for _ in range(2)], torch.randn(2, 7, 7)
    with pytest.raises(UserError, match=r"those of \S+Scaled are not declared; .*declare_branches\(Scaled, \[…\]\)"):
        connect(blocks, "mhc", width=7)
    for wrong in ("act", [], [3], 3, [" "], [BranchParts("norm")]):
        with pytest.raises(UserError, match=r"branches of Scaled: got .*, expected a list of paths"):
            declare_branches(Scaled, wrong)
    declare_branches(Scaled, ["act", "gain fcc"])
    with pytest.raises(UserError, match="branches of Scaled: got the path 'fcc', which Scaled does not have"):
        connect(blocks, "mhc", width=7)
    assert all(type(block) is Scaled for block in blocks)
    declare_branches(Scaled, ["act", "gain fc"])
    expected = nn.Sequential(*blocks)(x)
    torch.testing.assert_close(connect(blocks, "dense_former", width=7)(x), expected)


class Conditioned(nn.Module):
    """A block whose norms take what it is called with, or have no weights."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = Shifted(width), nn.LayerNorm(width, elementwise_affine=False)
        self.fc1, self.fc2 = Shifted(width), nn.Linear(width, width)

    def forward(self, x, shift):
        x = x + self.fc1(self.norm1(x, shift), shift)
        return x + self.fc2(self.norm2(x))


class Shifted(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)

    def forward(self, x, shift):
        return super().forward(x + shift)


def test_any_part_of_a_branch_may_take_the_blocks_arguments():
    declare_branches(Conditioned, ["norm1* fc1*", "norm2 fc2"])
    block, x, shift = Conditioned(7), torch.randn(2, 5, 7), torch.randn(7)
    first, second = stepsnet.branches_of(block)
    z = x + first(x, shift)
    torch.testing.assert_close(z + second(z), block(x, shift))
    expected = block(x, shift)
    (joined,) = connect([block], "complete_p", width=7)  # of one block: branches times 1
    torch.testing.assert_close(joined(x, shift), expected)


class Plain(nn.Module):
    """The block of a user's own, with an MLP alone."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.mlp = nn.Sequential(self.up, nn.GELU(), self.down)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def test_designs_that_work_on_linear_layers_take_a_block_of_ones_own():
    declare_branches(Plain, ["norm mlp"])
    message = r"linears of a branch, which \S+Plain does not declare; to declare it, give BranchParts to"
    with pytest.raises(UserError, match=message):
        connect([Plain(8)], "fixup")
    declare_branches(Plain, [BranchParts("norm", "mlp", hidden=(("up", 0, 1),), last="down")])
    blocks, x = [Plain(8) for _ in range(4)], torch.randn(2, 5, 8)
    joined, expected = connect(blocks, "fixup"), x
    for block in joined.blocks:
        nn.init.normal_(block.down.weight, std=0.1)
        expected = expected + block.mlp(expected)  # no norm; shifts start at 0, gains at 1
    torch.testing.assert_close(joined(x), expected)


class Attention(nn.Module):
    """One head, whose fused projection has its parts in another order: values, keys, queries."""

    def __init__(self, width):
        super().__init__()
        self.vkq, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        v, k, q = self.vkq(x).chunk(3, -1)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v))


class Mixed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), Attention(width)

    def forward(self, x):
        return x + self.attn(self.norm(x))


class Apart(Attention):
    def __init__(self, width):
        super().__init__(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return self.proj(nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class MixedApart(Mixed):
    def __init__(self, width):
        super().__init__(width)
        self.attn = Apart(width)


@pytest.mark.parametrize("name", ["mudd", "deep_cross_attention"])
def test_parts_of_a_projection_may_have_any_order(name):
    fused = tuple(("attn.vkq", part, 3) for part in (2, 1, 0))
    declare_branches(Mixed, [BranchParts("norm", "attn", projections=fused, last="attn.proj")])
    apart = tuple((f"attn.{part}", 0, 1) for part in "qkv")
    declare_branches(MixedApart, [BranchParts("norm", "attn", projections=apart, last="attn.proj")])
    ours, others = (connect([kind(8) for _ in range(3)], name) for kind in (Mixed, MixedApart))
    stirred(others)
    ours.load_state_dict({key: value for key, value in others.state_dict().items() if key in ours.state_dict()})
    for one, other in zip(ours.blocks, others.blocks):
        for key in ("weight", "bias"):
            parts = [getattr(getattr(other.attn, part), key) for part in "vkq"]
            getattr(one.attn.vkq, key).data = torch.cat(parts).detach()
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(ours(x), others(x))


class Dropping(Plain):
    def __init__(self, width):
        super().__init__(width)
        self.drop = nn.Identity()


class Written(Dropping):
    """The same, declared as a function that begins with the norm."""


def test_a_norm_stands_behind_what_a_function_returns():
    declare_branches(Dropping, ["norm mlp drop"])
    function = BranchParts("norm", after=("drop",), function=lambda block, x: block.mlp(block.norm(x)))
    declare_branches(Written, [function])
    blocks, written = ([kind(8) for _ in range(3)] for kind in (Dropping, Written))
    for block, other in zip(blocks, written):
        other.load_state_dict(block.state_dict())
    x = torch.randn(2, 5, 8)
    plain = nn.Sequential(*blocks)(x)
    expected = connect(blocks, "peri_ln")(x)
    torch.testing.assert_close(connect(written, "peri_ln")(x), expected, rtol=0, atol=0)
    assert (expected - plain).abs().max() > 0.1


@pytest.mark.parametrize("name", ["lambdas", "complete_p", "layer_norm_scaling"])  # each plain in one block
@pytest.mark.parametrize("masks", [{}, {"padding": True}, {"causal": True}])
@pytest.mark.parametrize("training", [True, False])
def test_the_encoder_layer_of_torch(name, masks, training):
    layer = nn.TransformerEncoderLayer(32, 4, 64, norm_first=True, batch_first=True).train(training)
    x, arguments = torch.randn(2, 6, 32), {}
    if "padding" in masks:
        arguments["src_key_padding_mask"] = torch.arange(6) > torch.tensor([[3], [5]])
    if "causal" in masks:
        arguments |= {"src_mask": nn.Transformer.generate_square_subsequent_mask(6), "is_causal": True}
    torch.manual_seed(0)
    expected = layer(x, **arguments)
    block = next(iter(connect([copy.deepcopy(layer)], name)))
    torch.manual_seed(0)
    torch.testing.assert_close(block(x, **arguments), expected, rtol=0, atol=0)


def test_an_encoder_layer_of_torch_with_norms_behind_the_sum_has_no_branches():
    assert stepsnet.branches_of(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)) is None


class InPlace(Plain):
    """A block that adds to the stream it has got."""

    def forward(self, x):
        x += self.mlp(self.norm(x.clone()))  # whose gradient needs x as it was
        return x


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dense_former", {}),
        ("dense_former", {"period": 2}),
        ("dense_former", {"dilation": 2}),
        ("alt_up", {}),
        ("lambdas", {}),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_designs_of_blocks_take_those_that_add_in_place(name, options, inference):
    network = stirred(connect([Plain(8) for _ in range(5)], name, width=8, **options), 0.5)
    other = connect([InPlace(8) for _ in range(5)], name, width=8, **options)
    other.load_state_dict(network.state_dict())
    x = torch.randn(2, 5, 8)
    if inference:
        with torch.inference_mode():
            torch.testing.assert_close(other(x.clone()), network(x), rtol=0, atol=0)
        return
    expected, ours = network(x), other(x.clone())
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    gradients = torch.autograd.grad(expected.square().sum(), list(network.parameters()))
    torch.testing.assert_close(torch.autograd.grad(ours.square().sum(), list(other.parameters())), gradients)


def test_branches_of_a_block_that_adds_in_place_are_declared():
    declare_branches(InPlace, ["norm mlp"])
    block, x = InPlace(8), torch.randn(2, 5, 8)
    expected = block(x.clone())
    torch.testing.assert_close(connect([block], "laurel", rank=2)(x), expected)
    declare_branches(InPlace, ["norm up down"])
    with pytest.raises(UserError, match="declared for InPlace are not all that it adds"):
        connect([InPlace(8)], "laurel", rank=2)


def test_the_norms_of_normformer_have_no_weights_where_those_of_the_block_have_none():
    block = Plain(8)
    block.norm = nn.LayerNorm(8, elementwise_affine=False)
    declare_branches(Plain, [BranchParts("norm", "mlp", hidden=(("up", 0, 1),), last="down")])
    (joined,) = connect([block], "normformer", width=8).blocks
    inner = joined.connections[0].inner
    assert not list(inner.parameters()) and inner.normalized_shape == (16,)
    inner.reset_parameters()


def test_a_batch_of_nothing_is_one_of_nothing():
    network, x = connect(vit().blocks, "normformer"), torch.empty(0, 5, 32)
    assert network(x).shape == x.shape


@pytest.mark.parametrize("name", ["mudd", "mhc", "dense_former"])
def test_kept_blocks_run_again_on_an_equal_stream(name):
    blocks = list(connect(vit().blocks, name))
    for _ in range(2):
        x = torch.ones(2, 5, 32)
        for block in blocks:
            x = block(x)
        x.sum().backward()


def test_fixup_scales_by_all_branches_of_the_model():
    class Thrice(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.parts = nn.ModuleList(Plain(width) for _ in range(3))

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return x

    paths = [[f"parts.{i}.{name}" for name in ("norm", "mlp", "up", "down")] for i in range(3)]
    parts = [BranchParts(norm, mlp, hidden=((up, 0, 1),), last=down) for norm, mlp, up, down in paths]
    declare_branches(Thrice, parts)
    blocks = connect([Thrice(8) for _ in range(4)], "fixup").blocks
    assert {one.branches for block in blocks for one in block.connections} == {12}


def test_the_norm_behind_a_branch_is_a_new_one():
    blocks, seen = [Plain(8) for _ in range(2)], []
    declare_branches(Plain, ["norm mlp"])
    for block in blocks:
        nn.init.constant_(block.norm.weight, 3.0)
        block.requires_grad_(False).norm.register_forward_hook(lambda *_: seen.append(1))
    joined = connect(blocks, "peri_ln")
    behind = [parameter for name, parameter in joined.named_parameters() if "connections" in name]
    assert all(p.requires_grad and set(p.tolist()) <= {0.0, 1.0} for p in behind) and len(behind) == 4
    seen.clear()
    joined(torch.randn(1, 2, 8))
    assert len(seen) == 2


def test_a_layer_derived_from_a_librarys_has_no_row_of_its():
    class Longer(LlamaDecoderLayer):
        def forward(self, hidden_states, *args, **kwargs):
            return super().forward(hidden_states, *args, **kwargs) + hidden_states

    layer = Longer(LlamaConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2), 0)
    assert stepsnet.branches_of(layer) is None


@pytest.mark.parametrize("name", JOINED)
def test_a_stepified_model_is_joined_step_by_step(name):
    """Its blocks keep their names, and it computes what a StepsNet of the same blocks does."""
    stepped = stepsnet.stepify(vit(embed_dim=64, depth=6, num_heads=4), steps=2)
    keys = stepped.state_dict().keys()
    options = {"rank": 4} if name == "laurel" else {}
    plain = copy.deepcopy(stepped.blocks)
    other = connect(stepsnet.StepsNet(plain.networks, plain.widths), name, **options)
    stepped.blocks = connect(stepped.blocks, name, **options)
    lost = {key for key in keys - stepped.state_dict().keys() if "norm" not in key}
    assert not lost and len(stepped.blocks) == len(plain)
    stirred(stepped, 0.1)
    flat = [f"networks.{i}.{j}." for i, depth in enumerate(plain.depths) for j in range(depth)]
    weights = {re.sub(r"^(\d+)\.", lambda block: flat[int(block[1])], key): value for key, value in _named(stepped)}
    other.load_state_dict(weights)
    x = torch.randn(2, 5, 64)
    expected = stepped.blocks(x)
    torch.testing.assert_close(other(x), expected)
    for blocks in (stepped.blocks, other):
        y = x
        for block in blocks:
            y = block(y)
        torch.testing.assert_close(y, expected)
    gradients = torch.autograd.grad(stepped(IMAGES).sum(), list(stepped.parameters()))
    stepped.train().set_grad_checkpointing()  # timm's, which runs the blocks one by one, and again
    torch.testing.assert_close(torch.autograd.grad(stepped(IMAGES).sum(), list(stepped.parameters())), gradients)


def _named(stepped):
    """The weights of a StepSequence, those of its streams under the names that a StepsNet has for them."""
    for key, value in stepped.blocks.state_dict().items():
        yield re.sub(r"^wirings\.(\d+)\.", r"networks.\1.wiring.", key), value


@pytest.mark.parametrize("name", JOINED)
def test_a_design_has_the_precision_and_the_device_of_its_blocks(name):
    model = vit(embed_dim=32).bfloat16()
    model.blocks = connect(model.blocks, name)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model(IMAGES.bfloat16()).isfinite().all()
    with torch.device("meta"):
        blocks = vit().blocks
    assert {p.device.type for p in connect(blocks, name).parameters()} == {"meta"}


@pytest.mark.parametrize("mlp_layer", [SwiGLU, SwiGLUPacked, partial(GluMlp, gate_last=True)])
def test_gated_mlps_of_timm_begin_as_gated_ones(mlp_layer):
    """The gate is not scaled, and the layer that it multiplies is."""
    torch.manual_seed(0)
    blocks = [Block(64, 4, mlp_ratio=8, mlp_layer=mlp_layer) for _ in range(8)]
    mlp = connect(blocks, "fixup").blocks[0].mlp
    if mlp_layer is SwiGLU:
        gate, values = mlp.fc1_g.weight, mlp.fc1_x.weight
    else:
        gate, values = mlp.fc1.weight.chunk(2) if mlp_layer is SwiGLUPacked else mlp.fc1.weight.chunk(2)[::-1]
    expected = math.sqrt(2 / sum(gate.shape))
    assert gate.std().item() == pytest.approx(expected, rel=0.05)
    assert values.std().item() == pytest.approx(expected / 4, rel=0.05)  # 16 branches
    assert not mlp.fc2.weight.any()


def test_start_values_are_those_of_biases_and_norms_too():
    model = vit(**{"qkv_bias": True})
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.3, 0.2)
    fixed, deep = (copy.deepcopy(model.blocks) for _ in range(2))
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(connect(fixed, "fixup")(x), x)
    norms = [one.norm for block in connect(deep, "deepnorm").blocks for one in block.connections]
    assert all(norm.weight.eq(1).all() and norm.bias.eq(0).all() for norm in norms)


def llama(width=64):
    config = LlamaConfig(hidden_size=width, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
    config._attn_implementation = "eager"
    return LlamaDecoderLayer(config, 0)


def gpt2(width=64):
    return GPT2Block(GPT2Config(n_embd=width, n_head=4, n_inner=128), 0)


@pytest.mark.parametrize("kind", [llama, gpt2])
@pytest.mark.parametrize("name", ["fixup", "deepnorm", "rezero"])
def test_start_values_reach_the_layers_of_language_models(name, kind):
    """Xavier's spread is √(2 / (in + out)); four blocks have eight branches. In Fixup an attention has four layers."""
    torch.manual_seed(0)
    block = connect([kind(256) for _ in range(4)], name).blocks[-1]
    beta, sixth = 32**-0.25, 8 ** (-1 / 6)
    scales = {
        "fixup": dict(queries=sixth, values=sixth, gate=1, hidden=8**-0.5, last=0),
        "deepnorm": dict(queries=1, values=beta, gate=beta, hidden=beta, last=beta),
        "rezero": dict(queries=1, values=1, gate=1, hidden=1, last=1),
    }[name]
    for role, weight in linears(block):
        expected = scales[role] * math.sqrt(2 / sum(weight.shape))
        assert weight.std().item() == pytest.approx(expected, rel=0.04), role


def linears(block):
    if hasattr(block, "attn"):
        queries, _, values = block.attn.c_attn.weight.chunk(3, 1)  # stored as (in, out)
        yield from (("queries", queries), ("values", values), ("last", block.attn.c_proj.weight))
        yield from (("hidden", block.mlp.c_fc.weight), ("last", block.mlp.c_proj.weight))
        return
    attention, mlp = block.self_attn, block.mlp
    yield from (("queries", attention.q_proj.weight), ("queries", attention.k_proj.weight))
    yield from (("values", attention.v_proj.weight), ("last", attention.o_proj.weight))
    yield from (("gate", mlp.gate_proj.weight), ("hidden", mlp.up_proj.weight), ("last", mlp.down_proj.weight))


def test_what_stands_in_front_of_the_last_layer_of_a_language_model():
    """Fixup's number and NormFormer's norm in a gated MLP, and its gains in an attention of four heads."""
    x = torch.randn(2, 5, 64)
    for name in ("fixup", "normformer"):
        block = stirred(connect([llama()], name), 0.3).blocks[0]
        attention, mlp = block.connections
        y = x + mlp.shift.shift if name == "fixup" else block.post_attention_layernorm(x)
        hidden = nn.functional.silu(y @ block.mlp.gate_proj.weight.T) * (y @ block.mlp.up_proj.weight.T)
        if name == "fixup":
            expected = x + mlp.gain.gain * ((hidden + mlp.inner.shift) @ block.mlp.down_proj.weight.T)
        else:
            normed = hidden * (hidden.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * mlp.inner.weight
            expected = x + normed @ block.mlp.down_proj.weight.T
            assert attention.inner.gain.shape == (4,)
        torch.testing.assert_close(mlp(x, BoundBranch(block, block.branch_parts[1], (), {})), expected)
    heads = torch.randn(2, 5, 64)
    scaled = attention.inner(heads).unflatten(-1, (4, 16))
    torch.testing.assert_close(scaled, heads.unflatten(-1, (4, 16)) * attention.inner.gain[:, None])


@pytest.mark.parametrize("is_parallel", [True, False])
def test_branches_of_gpt_neox_are_side_by_side_or_in_a_row(is_parallel):
    config = GPTNeoXConfig(
        hidden_size=32, num_attention_heads=2, intermediate_size=64, use_parallel_residual=is_parallel
    )
    config._attn_implementation = "eager"
    block = GPTNeoXLayer(config, 0).eval()
    x, positions = torch.randn(2, 5, 32), torch.arange(5)[None]
    kwargs = {"position_embeddings": GPTNeoXRotaryEmbedding(config)(x, positions), "attention_mask": None}
    branches = stepsnet.branches_of(block)
    assert len(branches) == (1 if is_parallel else 2)
    z = x + branches[0](x, **kwargs)
    torch.testing.assert_close(z if is_parallel else z + branches[1](z), block(x, **kwargs))


def test_blocks_stay_in_the_mode_that_they_are_in():
    steps = [nn.Sequential(Block(16, 2), Block(16, 2)), nn.Sequential(Block(32, 2))]
    container = stepsnet.StepsNet(steps, widths=(16, 32)).train()
    frozen = steps[0][1].eval()
    joined = connect(container, "mhc")
    assert joined.training and joined.networks[0].training and frozen.connections.training
    assert not frozen.training and not frozen.attn.training
    assert joined.networks[0][0:2].training and not frozen.training


@pytest.mark.parametrize("name", ["plain", "mhc", "peri_ln"])  # parts beside a block, and inside of it
def test_an_evaluated_model_stays_so(name):
    for joined in (
        lambda model: connect(model.blocks, name),
        lambda model: connect(list(model.blocks), name),
        lambda model: connect(model.blocks[:2], name),
        lambda model: stepsnet.stepify(model, steps=2, residual=name),
    ):
        assert not any(module.training for module in joined(vit(depth=4).eval()).modules())
        assert all(module.training for module in joined(vit(depth=4).train()).modules())


class Widened(nn.Sequential):
    """A residual block as a Sequential with a forward pass of its own."""

    def forward(self, x):
        return x + super().forward(x)


def test_a_sequential_with_a_forward_pass_of_its_own_stays_one_block(monkeypatch):
    blocks = [Widened(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2)]
    net, x = stepsnet.StepsNet([blocks[0], nn.Sequential(blocks[1])], (8, 8)), torch.randn(2, 3, 8)
    with pytest.raises(UserError, match="lambdas joins a block by its forward pass, and Widened is an nn"):
        connect(net, "lambdas")
    monkeypatch.setattr(known_blocks, "_DECLARED", dict(known_blocks._DECLARED))
    declare_branches(Widened, ["0 1"])
    expected = x
    for norm, linear in blocks:
        expected = expected + linear(norm(expected)) / 2
    joined = connect(net, "complete_p")
    assert len(joined) == 2
    torch.testing.assert_close(joined(x), expected)


@pytest.mark.parametrize("name", ["layer_scale", "lambdas"])
def test_a_mamba_of_low_precision_keeps_its_stream_in_float32(name):
    sizes = dict(vocab_size=20, hidden_size=16, state_size=4, num_hidden_layers=2)
    model = MambaModel(MambaConfig(**sizes)).bfloat16()
    kinds = []
    model.norm_f.register_forward_pre_hook(lambda module, inputs: kinds.append(inputs[0].dtype))
    for joined in (False, True):
        model.layers = connect(list(model.layers), name) if joined else model.layers
        model(torch.arange(6)[None])
    assert kinds == [torch.float32, torch.float32]
