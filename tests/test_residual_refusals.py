"""What a design refuses, in one line: options, blocks and places that it is not for; nothing is changed then."""

import copy
import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import timm
import torch
import transformers
from residual_networks import JOINED, OPTIONS, STEPS, WIDTH, vit
from timm.models.eva import EvaBlock
from timm.models.resnet import Bottleneck
from timm.models.vision_transformer import Block
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import stepsnet
import stepsnet.residual
from stepsnet.analysis.design_costs import design_costs
from stepsnet.cli import main
from stepsnet.errors import UserError
from stepsnet.models.build import build_model
from stepsnet.residual import DESIGNS, BranchParts, Connection, Wiring, connect, declare_branches
from stepsnet.settings.config import ModelSpec
from stepsnet.settings.user_modules import import_user_modules


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"residual": "mch"}, "residual: got 'mch', expected one of plain, .*did you mean mhc"),
        (
            {"residual": "mhc", "residual_options": {"stream": 4}},
            "got the option 'stream', expected streams, iterations.*streams",
        ),
        ({"residual": "mhc", "residual_options": {"streams": 1}}, "streams of mhc: got 1, expected 2 to 64"),
        ({"residual": "mhc", "residual_options": {"streams": "4"}}, "streams of mhc: got '4', expected a value such"),
        ({"residual": "rezero", "residual_options": {"rate": 1}}, "rezero got the option 'rate', expected none"),
        ({"residual": "plain", "residual_options": {"rate": 1}}, "plain got the option 'rate', expected none"),
        ({"residual": "laurel", "residual_options": {"rank": 17}}, "rank of laurel: got 17, expected 1 to 16"),
        (
            {"residual": "layer_scale", "residual_options": {"initial": -1}},
            "initial of layer_scale: got -1, expected 0",
        ),
        (
            {"residual": "dense_former", "residual_options": {"period": 10**9}},
            "period of dense_former: got 1000000000, e",
        ),
        (
            {"residual": "bowtie"},
            "got 'bowtie', which is a profile of widths, expected a design; .* stepsnet.stepify.*profile='bowtie'",
        ),
        ({"residual": ["mhc"]}, "residual: got ..mhc.., expected one of plain"),
        ({"residual": ""}, "residual: got '', expected one of plain"),
        ({"residual": "mhc", "residual_options": 4}, "residual_options: got 4, expected a mapping"),
    ],
)
def test_a_mistake_is_one_line(arguments, message):
    with pytest.raises(UserError, match=message) as error:
        build_model(ModelSpec("steps_deit_tiny_patch16_224", {**STEPS, **arguments}))
    assert "\n" not in str(error.value)


def test_blocks_that_a_design_is_not_for_are_refused():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2}
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=20, **sizes))
    with pytest.raises(UserError, match="StepsLlamaDecoderLayer is already a layer of a transformers model in steps"):
        stepsnet.residual.connect(stepsnet.stepify(plain, steps=2).model.layers, "mhc")
    with pytest.raises(
        UserError, match=r"mhc joins the branches of a block, and those of torch.nn.*Linear are not declared"
    ):
        stepsnet.residual.connect([torch.nn.Linear(4, 4)], "mhc")
    with pytest.raises(
        UserError, match=r"fixup works on the linears of a branch, which timm.models.eva.EvaBlock does not declare"
    ):
        stepsnet.residual.connect([EvaBlock(WIDTH, 2)], "fixup")
    with pytest.raises(UserError, match="Bottleneck has convolutions over images"):
        stepsnet.residual.connect([Bottleneck(64, 16)], "mhc")
    other = Block(WIDTH, 2)
    other.attn.qkv = torch.nn.Identity()
    with pytest.raises(UserError, match=r"mudd: attn\.qkv of Block: got Identity, expected Linear"):
        stepsnet.residual.connect([other], "mudd")
    connected = stepsnet.residual.connect([Block(WIDTH, 2)], "mhc")
    for again in (connected, list(connected), connected.blocks, connected[:1]):
        for name in ("laurel", "plain"):
            with pytest.raises(UserError, match="the stream of these blocks has a design already, expected blocks wit"):
                stepsnet.residual.connect(again, name)
    with pytest.raises(UserError, match=r"the width of torch.nn.*Linear is not known, expected width=C, or branches"):
        stepsnet.residual.connect([torch.nn.Linear(4, 4)], "dense_former")


class Convolved(nn.Module):
    """A block of one's own with a convolution, of channels last or first."""

    def __init__(self, kind, last, width=WIDTH):
        super().__init__()
        self.last, self.conv = last, kind(width, width, 3, padding=1)

    def forward(self, x):
        return x + (self.conv(x.movedim(-1, 1)).movedim(1, -1) if self.last else self.conv(x))


@pytest.mark.parametrize(
    "kind, of", [(nn.Conv1d, "sequences .B, C, N"), (nn.Conv2d, "images .B, C, H, W"), (nn.Conv3d, "volumes .B, C, D")]
)
def test_blocks_with_convolutions_have_their_channels_last(kind, of):
    blocks = [Convolved(kind, last=False) for _ in range(2)]
    with pytest.raises(UserError, match=f"Convolved has convolutions over {of}.*, expected blocks with channels last"):
        connect(blocks, "dense_former", width=WIDTH)
    assert {type(block) for block in blocks} == {Convolved}
    dims = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}[kind]
    x = torch.randn(2, *(5,) * dims, WIDTH)
    assert connect([Convolved(kind, last=True) for _ in range(2)], "dense_former", width=WIDTH)(x).shape == x.shape


def test_a_list_of_lists_holds_no_blocks():
    layers = nn.ModuleList(nn.ModuleList([Block(WIDTH, 2)]) for _ in range(2))
    with pytest.raises(UserError, match="got a ModuleList among the blocks, which has no forward pass, expected bl"):
        connect(layers, "dense_former", width=WIDTH)
    assert {type(layer) for layer in layers} == {nn.ModuleList}


def test_a_refusal_changes_nothing():
    model = vit(depth=3)
    model.blocks[2].attn.qkv = nn.Sequential(model.blocks[2].attn.qkv)  # no linear layer to take apart
    images = torch.randn(2, 3, 32, 32)
    before = model(images)
    for name in ("deep_cross_attention", "mudd"):
        with pytest.raises(UserError, match=f"{name}: attn.qkv of Block: got Sequential, expected Linear"):
            connect(model.blocks, name)
    with pytest.raises(UserError, match="width: got 100, but the blocks' norms have 32 channels"):
        connect(model.blocks, "mhc", width=100)
    assert all(type(block) is timm.models.vision_transformer.Block for block in model.blocks)
    torch.testing.assert_close(model(images), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["layer_scale", "rezero", "deepnorm", "fixup", "normformer"])
def test_two_scales_behind_a_branch_are_refused(name):
    message = f"{name} scales the branches, and so does ls1 of Block, expected only one of the two"
    with pytest.raises(UserError, match=message):
        connect(vit(init_values=1e-5).blocks, name)
    with pytest.raises(
        UserError, match=f"{name} scales the branches, and so does gamma_1 of Block|the linears of a branch"
    ):
        connect(vit("beit_base_patch16_224").blocks, name)


def test_a_design_that_one_step_is_not_for_changes_no_step():
    blocks = stepsnet.stepify(vit(embed_dim=64, depth=6, num_heads=4), steps=2, profile="reverse").blocks
    with pytest.raises(
        UserError, match=f"rank of laurel: got {blocks.widths[1] + 1}, expected 1 to {blocks.widths[1]}"
    ):
        connect(blocks, "laurel", rank=blocks.widths[1] + 1)
    assert {type(block) for block in blocks.blocks} == {timm.models.vision_transformer.Block}
    with pytest.raises(UserError, match="width: got 64 for a StepsNet, expected none"):
        connect(blocks, "mhc", width=64)
    assert connect(blocks, "plain") is blocks
    for places, message in (
        ({"num_blocks": 0}, "num_blocks: got 0"),
        ({"first": "a"}, "first: got 'a', expected a whole number"),
    ):
        with pytest.raises(UserError, match=message):
            connect(blocks, "mhc", **places)
    with pytest.raises(UserError, match="num_blocks: got 3, expected at least 9"):
        connect(blocks, "mhc", num_blocks=3)
    with pytest.raises(UserError, match="got blocks with channels in dimension 1, expected channels last"):
        connect(stepsnet.StepsNet([nn.Sequential(Block(64, 4))], [64], dim=1), "mhc")
    with pytest.raises(UserError, match="got a StepsNet within a StepsNet"):
        connect(stepsnet.StepsNet([blocks], [64]), "mhc")
    whole = connect(stepsnet.StepsNet(blocks.networks, blocks.widths), "mhc")
    for again in (whole, connect(stepsnet.stepify(vit(), 2).blocks, "mhc")):
        with pytest.raises(UserError, match="the steps have a design already"):
            connect(again, "plain")


class OwnAttention(nn.Module):
    """Of two heads, which say it where they are given ``known``."""

    def __init__(self, width, known):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        if known:
            self.num_heads = 2

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(-2))


class OwnBlock(nn.Module):
    def __init__(self, width, known=False):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.up, self.down = OwnAttention(width, known), nn.Linear(width, 8), nn.Linear(8, width)
        self.mlp = nn.Sequential(self.up, nn.GELU(), self.down)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


_PARTS = tuple(("attention.qkv", part, 3) for part in range(3))
stepsnet.residual.declare_branches(
    OwnBlock,
    [
        BranchParts("norm1", "attention", projections=_PARTS, last="attention.proj"),
        BranchParts("norm2", "mlp", hidden=(("up", 0, 1),), last="down"),
    ],
)


@pytest.mark.parametrize("name", JOINED)
def test_an_attention_of_ones_own_need_not_know_its_heads(name):
    """But for NormFormer, which has a gain for each."""
    x, options = torch.randn(2, 5, WIDTH), OPTIONS.get(name, {})
    blocks = [OwnBlock(WIDTH) for _ in range(2)]
    if name == "normformer":
        with pytest.raises(UserError, match="attention of OwnBlock: got no heads of 32 channels, expected head_dim or"):
            connect(blocks, name)
        blocks = [OwnBlock(WIDTH, known=True) for _ in range(2)]
    connected = connect(blocks, name, **options)
    assert connected(x).shape == x.shape
    if name == "normformer":
        assert connected.blocks[0].connections[0].inner.gain.shape == (2,)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"projections": (("a.qkv", 0, 3),) * 2}, "projections: got .*, expected three tuples .path of a layer, in"),
        (
            {"projections": ("a.qkv",) * 3},
            "projections: got .*, expected three tuples .path of a layer, index of the part of its output",
        ),
        ({"projections": (("a.qkv", 0, 3), ("a.qkv", 1, 3), ("a.qkv", 3, 3))}, "projections: got"),
        ({"hidden": ("u", 0, 1)}, "hidden: got .'u', 0, 1., expected tuples .path of a layer, index of the part of"),
        ({"hidden": (("u", -1, 1),)}, "hidden: got"),
        ({"hidden": None}, "hidden: got None"),
        ({"norm": None}, "norm: got None, expected a path in the block"),
        ({"after": "ls1"}, "after: got 'ls1', expected a tuple of paths"),
        ({"function": "f"}, "function: got 'f', expected"),
    ],
)
def test_the_parts_of_a_branch_are_checked_as_they_are_declared(parts, message):
    with pytest.raises(UserError, match=f"residual: BranchParts: {message}"):
        BranchParts(**{"norm": "norm1", "layer": "attention", **parts})


class Declared(OwnBlock):
    pass


@pytest.mark.parametrize("name", ["fixup", "laurel", "mudd"])
def test_all_declared_paths_lead_to_a_module(name):
    blocks = [Declared(WIDTH) for _ in range(2)]
    attention, mlp = BranchParts("norm1", "attention"), BranchParts("norm2", "mlp", hidden=(("up", 0, 1),), last="down")
    for wrong, message in (
        (replace(mlp, last="dow"), "got the path 'dow', which Declared does not have"),
        (replace(mlp, hidden=(("uq", 0, 1),)), "got the path 'uq', which Declared does not have"),
        (replace(mlp, last="down.weight"), "down.weight: got Parameter, expected a module"),
        (replace(mlp, norm="norm2.bias"), "norm2.bias: got Parameter, expected a module"),
    ):
        declare_branches(Declared, [replace(attention, projections=_PARTS, last="attention.proj"), wrong])
        with pytest.raises(UserError, match=f"branches of Declared: {message}"):
            connect(blocks, name)
    declare_branches(Declared, [attention, replace(mlp, last="mlp")])
    if name == "laurel":
        connect([Declared(WIDTH)], name, rank=4)
    if name == "fixup":
        sevenths = tuple(("attention.qkv", part, 7) for part in (4, 5, 6))
        declare_branches(Declared, [replace(attention, projections=sevenths, last="attention.proj"), mlp])
        message = "qkv of Declared is not a linear layer that splits into the declared equal parts"
        with pytest.raises(UserError, match=message):
            connect(blocks, name)
    assert {type(block) for block in blocks} == {Declared} and type(blocks[0].norm1) is nn.LayerNorm


class OwnMixer(nn.Linear):
    def forward(self, x, **masks):
        return super().forward(x)


def test_an_attention_of_ones_own_in_a_block_of_timms_has_linear_layers_that_are_not_known():
    blocks = [Block(WIDTH, 2) for _ in range(2)]
    for block in blocks:
        block.attn, block.mlp = OwnMixer(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    with pytest.raises(
        UserError, match=r"mudd works on the projections of a branch, which timm.models.vision_transformer.Block does n"
    ):
        connect(blocks, "mudd")
    x = torch.randn(2, 5, WIDTH)
    torch.testing.assert_close(connect(copy.deepcopy(blocks), "laurel", rank=4)(x), nn.Sequential(*blocks)(x))


@pytest.mark.parametrize(
    ("projections", "message"),
    [
        ([("attention.qkv", 0, 3), ("attention.qkv", 1, 3), ("attention.qkv", 1, 3)], r"\[0, 1, 1\] of 3"),
        ([("attention.qkv", 0, 4), ("attention.qkv", 1, 4), ("attention.qkv", 2, 4)], r"\[0, 1, 2\] of 4"),
        ([("attention.qkv", 0, 1), ("attention.other", 0, 1), ("up", 0, 1)], r"\[0, 0\] of 1"),
    ],
)
def test_each_part_of_a_projection_is_queries_keys_or_values(projections, message):
    parts = BranchParts("norm1", "attention", projections=tuple(projections), last="attention.proj")
    declare_branches(Declared, [parts, BranchParts("norm2", "mlp")])
    block = Declared(WIDTH)
    block.attention.other = block.attention.qkv
    for name in ("mudd", "deep_cross_attention"):
        with pytest.raises(UserError, match=f"{name}: attention.qkv of Declared: got the parts {message}, expected ea"):
            connect([block], name)
    declare_branches(Declared, [replace(parts, projections=_PARTS, function=lambda block, x: x)])
    with pytest.raises(UserError, match="mudd: got the attention of Declared as a function, expected the path of its"):
        connect([block], "mudd")


@pytest.mark.parametrize("name", ["layer_norm_scaling", "fixup", "normformer", "value_residual"])
def test_a_module_of_several_branches_is_not_given_the_hooks_of_all(name):
    path = {"layer_norm_scaling": "norm1", "value_residual": "attention.qkv"}.get(name, "attention.proj")
    blocks = [OwnBlock(WIDTH, known=True) for _ in range(2)]
    blocks[1].norm1, blocks[1].attention = blocks[0].norm1, blocks[0].attention
    message = f"{name} works on {path} of branch 1 of block 2, which is also {path} of branch 1 of block 1, expected a"
    with pytest.raises(UserError, match=message):
        connect(blocks, name)
    x = torch.randn(2, 5, WIDTH)
    for free in ("mudd", "peri_ln", "lambdas"):
        assert connect(copy.deepcopy(blocks), free)(x).isfinite().all()
    blocks = [OwnBlock(WIDTH) for _ in range(2)]
    blocks[1].norm2 = blocks[1].norm1
    if name == "layer_norm_scaling":
        with pytest.raises(UserError, match="norm2 of branch 2 of block 2, which is also norm1 of branch 1 of block 2"):
            connect(blocks, name)


def test_gpt2_with_an_encoder_has_a_branch_that_is_not_declared():
    config = transformers.GPT2Config(n_embd=WIDTH, n_head=2, add_cross_attention=True)
    block = GPT2Block(config, 0)
    with pytest.raises(UserError, match=r"and those of .*GPT2Block are declared only without cross-attention"):
        connect([block], "laurel", width=WIDTH)
    assert stepsnet.branches_of(block) is None
    x, other = torch.randn(2, 5, WIDTH), torch.randn(2, 3, WIDTH)
    expected = block.eval()(x, encoder_hidden_states=other)
    (joined,) = connect([block], "dense_former", width=WIDTH).blocks
    torch.testing.assert_close(joined((x, x), encoder_hidden_states=other)[-1], expected)


def test_a_block_that_returns_a_tuple_is_refused():
    class Two(OwnBlock):
        def forward(self, x):
            return super().forward(x), None

    with pytest.raises(UserError, match="residual: Two returned tuple, expected one tensor, the stream"):
        connect([Two(WIDTH)], "lambdas", width=WIDTH)(torch.randn(2, 5, WIDTH))


def test_a_norm_that_normformer_cannot_make_is_refused():
    class Norm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x):
            return x * self.weight

    block = OwnBlock(WIDTH, known=True)
    block.norm2 = Norm(WIDTH)
    with pytest.raises(UserError, match=r"normformer: got the norm Norm, expected one that is made by Norm\(C, eps=…"):
        connect([block], "normformer")
    assert type(block) is OwnBlock


@pytest.mark.parametrize("name", ["peri_ln", "layer_norm_scaling"])
def test_a_norm_behind_a_branch_is_refused_by_what_it_would_undo_or_double(name):
    config = transformers.Gemma2Config(
        hidden_size=WIDTH, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, head_dim=16
    )
    message = "post_attention_layernorm of Gemma2DecoderLayer is a norm at the end of a branch, expected none there"
    with pytest.raises(UserError, match=f"{name}: {message}"):
        connect([Gemma2DecoderLayer(config, 0)], name)


class Half(Connection):
    title, source = "branches by a half", "nowhere"

    def forward(self, x, F):
        return x + 0.5 * F(x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unit": "blocks"}, "residual: unit of mine: got 'blocks', expected branch, block, branches"),
        ({"title": None}, "residual: title of mine: got None, expected some text"),
        ({"source": ""}, "residual: source of mine: got '', expected some text"),
        (
            {"needs": "norm"},
            "residual: needs of mine: got 'norm', expected a tuple of names from norm, linears, values, projections",
        ),
        ({"needs": ("norms",)}, "residual: needs of mine: got .'norms',., expected a tuple of names from n"),
        ({"wiring": nn.Identity}, "residual: wiring of mine: got .*Identity.*, expected a subclass of Wiring"),
        ({"options": ("streams",)}, "residual: options of mine: got .'streams',., expected a mapping of names to def"),
        ({"forward": Connection.forward}, "residual: forward of mine: got none of its own, expected .self, state, F"),
        ({"forward": lambda self, x: x}, "residual: forward of mine: got .self, x., expected .self, state, F"),
    ],
)
def test_a_design_of_ones_own_is_checked(monkeypatch, changes, message):
    monkeypatch.setitem(DESIGNS, "mine", type("Mine", (Half,), changes))
    with pytest.raises(UserError, match=message):
        connect([Block(WIDTH, 2)], "mine")
    with pytest.raises(UserError, match=message):
        list(design_costs(WIDTH, 1, 2, names=["mine"]))


def test_a_design_of_ones_own_is_shown_or_refused_in_a_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "of_mine.py").write_text(
        "from stepsnet.residual import DESIGNS, Connection\n"
        "class Mine(Connection):\n    title = source = 'mine'\nDESIGNS['of_mine'] = Mine\n"
    )
    monkeypatch.chdir(tmp_path)
    try:
        assert main(["models", "--residual", "of_mine", "--import", "of_mine"]) == 2
    finally:
        DESIGNS.pop("of_mine", None)
    said = "stepsnet: residual: forward of of_mine: got none of its own, expected (self, state, F)\n"
    assert capsys.readouterr().err == said


def test_a_name_of_the_packages_own_keeps_its_design():
    """Results and pages say mhc of what is in mhc.py."""
    published, taken = dict(DESIGNS), "the name of one of stepsnet's own, expected another name"
    for name in ("mhc", "plain"):
        with pytest.raises(UserError, match=f"got a design called {name}, {taken}"):
            DESIGNS[name] = Half
    for enter in (DESIGNS.update, DESIGNS.__ior__, lambda more: DESIGNS.update(**more)):
        with pytest.raises(UserError, match=f"got a design called mhc, {taken}"):
            enter({"mhc": Half})
    assert published == DESIGNS


@pytest.mark.usefixtures("own_registrations")
def test_a_name_is_of_one_design(tmp_path, monkeypatch):
    """A study imports the modules of all contenders, where the last design of a name would be that of all."""
    text = (
        "from stepsnet.residual import DESIGNS, Connection\nclass Mine(Connection):\n    title = source = 'mine'\n"
        "    def forward(self, x, F):\n        return F(x)\n"
    )
    ways = ("DESIGNS['of_mine'] = Mine", "DESIGNS.update(of_mine=Mine)", "DESIGNS |= {'of_mine': Mine}")
    for number, way in enumerate(ways):
        (tmp_path / f"my_design_{number}.py").write_text(f"{text}{way}\n")
    monkeypatch.chdir(tmp_path)
    import_user_modules(["my_design_0"])
    for number in (1, 2):
        with pytest.raises(UserError, match=f"two designs called of_mine, from my_design_0 and my_design_{number}, e"):
            import_user_modules([f"my_design_{number}"])
    first = DESIGNS["of_mine"]
    assert importlib.reload(sys.modules["my_design_0"]).Mine is DESIGNS["of_mine"] is not first
    script = SimpleNamespace(__file__=str(tmp_path / "my_design_0.py"))  # which is imported by its name, too
    monkeypatch.setitem(sys.modules, "my_script", script)
    DESIGNS["of_mine"] = type("Mine", (Half,), {"__module__": "my_script"})


def test_a_mistake_inside_of_a_design_is_said_with_its_place(tmp_path, monkeypatch, capsys):
    """And not as one of the model's arguments, whose value the message may quote; in a file beside the module too."""
    (tmp_path / "my_gains.py").write_text("def gain(width):\n    return [1.0, 0.5][width]\n")
    (tmp_path / "my_gained.py").write_text(
        "from my_gains import gain\nfrom stepsnet.residual import DESIGNS, Connection\n"
        "class Gained(Connection):\n    title = source = 'mine'\n"
        "    def __init__(self, place, options):\n"
        "        super().__init__(place, options)\n        self.gain = gain(place.width)\n"
        "    def forward(self, x, F):\n        return x + self.gain * F(x)\nDESIGNS['gained'] = Gained\n"
    )
    monkeypatch.chdir(tmp_path)
    try:
        given = ["import=[my_gained]", "model.args.residual=gained", "model.args.num_heads=[2, 2, 3]"]
        assert main(["train", "digits/tiny", "--run", "run", *given]) == 2
    finally:
        DESIGNS.pop("gained", None)
    said = f"{tmp_path / 'my_gains.py'}, line 2: IndexError: list index out of range\n"
    assert capsys.readouterr().err.endswith(said)


def test_what_is_no_connection_is_no_design(monkeypatch):
    monkeypatch.setitem(DESIGNS, "mine", nn.Identity)
    with pytest.raises(UserError, match=r"residual: mine: got .*Identity.*, expected a subclass of Connection"):
        connect([Block(WIDTH, 2)], "mine")


class _Unfinished(Wiring):
    def finish(self, state):
        return state


@pytest.mark.parametrize("wiring", [Wiring, _Unfinished])
def test_several_tensors_need_a_wiring_that_ends_in_one(wiring, monkeypatch):
    class Tuples(Half):
        def forward(self, x, F):
            x = x[0] if isinstance(x, tuple) else x
            return x, F(x)

    Tuples.wiring = wiring
    monkeypatch.setitem(DESIGNS, "mine", Tuples)
    network = connect([Block(WIDTH, 2)], "mine")
    for run in (network, next(iter(network))):
        with pytest.raises(UserError, match="finish of the design's Wiring returned tuple, expected one tensor"):
            run(torch.randn(2, 5, WIDTH))


@pytest.mark.parametrize("name", ["fixup", "deepnorm", "mudd"])  # a part taken out, weights drawn, a stream that grows
@pytest.mark.parametrize("in_steps", [False, True])
def test_a_design_that_cannot_be_made_leaves_the_blocks_as_they_were(monkeypatch, name, in_steps):
    class Failing(DESIGNS[name]):
        def __init__(self, place, options):
            if place.block == 4:
                raise ZeroDivisionError
            super().__init__(place, options)

    monkeypatch.setitem(DESIGNS, "mine", Failing)
    model = vit(depth=4, embed_dim=64, num_heads=4)
    if in_steps:
        model = stepsnet.stepify(model, steps=2)
    before = {path: type(module) for path, module in model.named_modules()}
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ZeroDivisionError):
        connect(model.blocks, "mine")
    assert {path: type(module) for path, module in model.named_modules()} == before
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    model.blocks = connect(model.blocks, name)  # and another joins them
    assert model(torch.randn(2, 3, 32, 32)).isfinite().all()


@pytest.mark.parametrize("where", ["prepare", "init_branch"])
def test_blocks_that_a_failing_design_has_joined_in_part_are_said_to_be(monkeypatch, where):
    def fail(*arguments):
        raise ZeroDivisionError

    monkeypatch.setitem(DESIGNS, "mine", type("Failing", (Half,), {where: fail}))
    with pytest.raises(ZeroDivisionError) as raised:
        connect([Block(WIDTH, 2) for _ in range(2)], "mine")
    assert raised.value.__notes__ == ["the blocks may be partly joined: build them anew"]


class Masked(nn.Module):
    """A block of one's own, whose mixer takes a mask."""

    def __init__(self, width=8):
        super().__init__()
        self.norm1, self.mixer = nn.LayerNorm(width), Mixer(width)
        self.norm2, self.mlp = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x, mask=None):
        x = x + self.mixer(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Mixer(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)

    def forward(self, x, mask=None):
        return super().forward(x if mask is None else x * mask)


def test_an_argument_that_no_branch_takes_is_refused():
    """A causal mask that is lost lets a language model see what it is to predict."""
    x, mask = torch.randn(2, 5, 8), torch.rand(5, 1)
    declare_branches(Masked, ["norm1 mixer", "norm2 mlp"])
    blocks = [Masked() for _ in range(2)]
    joined = connect(copy.deepcopy(blocks), "laurel", rank=2)
    assert joined.blocks[0](x, mask=None).shape == x.shape
    for args, kwargs, what in (((mask,), {}, r"1 positional argument\(s\) besides"), ((), {"mask": mask}, "mask")):
        with pytest.raises(UserError, match=f"Masked got {what}.*, which none of its declared branches takes"):
            joined.blocks[0](x, *args, **kwargs)
    declare_branches(Masked, [lambda block, x: block.mixer(block.norm1(x)), "norm2 mlp"])
    joined = connect(copy.deepcopy(blocks), "laurel", rank=2)
    for args, kwargs, what in (((mask,), {}, r"1 positional argument\(s\) besides"), ((), {"mask": mask}, "mask")):
        with pytest.raises(UserError, match=f"Masked got {what}.*, which a function declared for its branches"):
            joined.blocks[0](x, *args, **kwargs)
    declare_branches(Masked, ["norm1 mixer*", "norm2 mlp"])
    joined = connect(copy.deepcopy(blocks), "laurel", rank=2)
    torch.testing.assert_close(joined.blocks[0](x, mask=mask), blocks[0](x, mask))


def test_a_branch_that_does_not_run_where_its_block_does_is_refused_by_its_number():
    """Not by torch, in the first forward pass: nn.MultiheadAttention takes queries, keys and values."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.attn = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def attend(self, x):
            y = self.norm(x)
            return self.attn(y, y, y)[0]

        def forward(self, x):
            return x + self.attend(x)

    declare_branches(Own, ["norm attn*"])
    blocks, x = [Own(), Own()], torch.randn(2, 5, WIDTH)
    with pytest.raises(
        UserError, match=r"branch 1 declared for Own does not run .*: MultiheadAttention.forward\(\) mis"
    ):
        connect(blocks, "laurel")
    declare_branches(Own, [BranchParts(norm="norm", function=Own.attend)])
    with pytest.raises(UserError, match=r"its nn.MultiheadAttention holds queries, keys and values in one parameter"):
        connect(blocks, "value_residual")
    assert connect(blocks, "peri_ln")(x).shape == x.shape


def test_branches_are_declared_for_a_class():
    with pytest.raises(UserError, match="branches: got an instance of OwnBlock, expected the class of the blocks"):
        declare_branches(OwnBlock(WIDTH), ["norm1 attention", "norm2 mlp"])


def test_a_layer_with_norms_behind_the_sums_is_said_to_be_declared_with_norms_in_front():
    message = "those of torch.*TransformerEncoderLayer are declared only with norm_first=True"
    with pytest.raises(UserError, match=message):
        connect([nn.TransformerEncoderLayer(WIDTH, 2, batch_first=True)], "mhc")


@pytest.mark.parametrize("name", JOINED)
def test_the_container_that_was_given_does_not_run_blocks_of_a_larger_state(name):
    blocks = nn.Sequential(Block(WIDTH, 2), Block(WIDTH, 2))
    connected, x = connect(blocks, name, **OPTIONS.get(name, {})), torch.randn(2, 5, WIDTH)
    if type(connected.wiring) is Wiring:
        torch.testing.assert_close(blocks(x), connected(x))
        return
    with pytest.raises(
        UserError, match=r"Block: got a stream, expected the state .* run the container that connect re"
    ):
        blocks(x)


class _Wider(Wiring):
    def start(self, x):
        return torch.cat([x, x], -1)

    def finish(self, state):
        return state.chunk(2, -1)[0]


def test_a_state_of_a_design_of_ones_own_may_be_a_tensor_of_any_shape(monkeypatch):
    def forward(self, state, F):
        x, start = state.chunk(2, -1)
        return torch.cat([x + F(x), start], -1)

    monkeypatch.setitem(DESIGNS, "mine", type("Mine", (Half,), {"wiring": _Wider, "forward": forward}))
    blocks, x = [Block(WIDTH, 2) for _ in range(2)], torch.randn(2, 5, WIDTH)
    expected = nn.Sequential(*blocks)(x)
    torch.testing.assert_close(connect(blocks, "mine")(x), expected)


def test_an_input_of_another_width_is_that_of_the_blocks():
    with pytest.raises(ValueError, match=r"^input of the blocks: got 16 channels, expected 32$"):
        connect([Block(WIDTH, 2)], "mhc")(torch.randn(2, 5, 16))


@pytest.mark.parametrize("branches", [["norm1 mixer*"], ["norm2 mlp", "norm1 mixer*"], [lambda block, x, mask=None: x]])
def test_declared_branches_have_to_add_up_to_the_block(branches):
    declare_branches(Masked, branches)
    with pytest.raises(UserError, match="declared for Masked are not all that it adds to the stream, or not in this"):
        connect([Masked() for _ in range(2)], "laurel", width=8)
    stepsnet.register_block(Masked, lambda block, width, heads: Masked(width))
    with pytest.raises(UserError, match="declared for Masked are not all that it adds"):
        stepsnet.stepify(nn.Sequential(*(Masked(32) for _ in range(4))), 2, example=torch.randn(2, 5, 32))


class Adapted(nn.Module):
    """As an adapter of PEFT's takes the place of a layer."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x):
        return self.base_layer(x)


@pytest.mark.parametrize("name", ["mudd", "deep_cross_attention", "value_residual", "normformer", "fixup"])
def test_an_adapter_around_a_layer_that_the_design_works_on_is_refused(name):
    model = vit()
    model.blocks = connect(model.blocks, name)
    x = torch.randn(2, 3, 32, 32)
    model(x)
    attention = model.blocks[1].attn
    path = "proj" if name in ("normformer", "fixup") else "qkv"
    setattr(attention, path, Adapted(getattr(attention, path)))
    with pytest.raises(UserError, match=f"attn.{path} of ConnectedBlock: got Adapted in place of the layer"):
        model(x)


def test_a_checkpoint_without_gradients_for_several_tensors_is_refused():
    args = {"widths": [32], "depths": [2], "num_attention_heads": [1], "vocab_size": 31, "residual": "value_residual"}
    model = build_model(ModelSpec("steps_transformer", args)).train()
    ids = torch.arange(10)[None]
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(UserError, match=r"got use_reentrant=True, .* expected use_reentrant=False"):
        model(ids, use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class _MlpFirst(nn.Module):
    """x + MLP(x), and behind it what stands for an attention; ``_Across`` has another of those."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.mlp, self.v, self.v3 = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        x = x + self.mlp(self.norm1(x))
        return x + self.v(self.norm2(x))


class _Across(_MlpFirst):
    def forward(self, x):
        x = super().forward(x)
        return x + self.v3(self.norm3(x))


@pytest.fixture
def declared():
    def attention(norm, path):
        return BranchParts(norm=norm, layer=path, projections=((path, 0, 1),) * 3)

    mlp = BranchParts(norm="norm1", layer="mlp")
    declare_branches(_MlpFirst, [mlp, attention("norm2", "v")])
    declare_branches(_Across, [mlp, attention("norm2", "v"), attention("norm3", "v3")])


def test_value_residual_counts_attentions_not_branches(declared):
    torch.manual_seed(0)
    blocks = connect(nn.Sequential(*(_MlpFirst() for _ in range(3))), "value_residual")
    mixes = [[one.mix is not None for one in block.connections] for block in blocks.blocks]
    assert mixes == [[False, False], [False, True], [False, True]]
    blocks(torch.randn(2, 4, WIDTH)).sum().backward()
    assert all(one.grad is not None for name, one in blocks.named_parameters() if "3." not in name)  # DDP waits for it
    with pytest.raises(UserError, match="value_residual: got _Across with 2 attentions, expected one in each block"):
        connect(nn.Sequential(_Across()), "value_residual")


def test_value_residual_keeps_nothing_of_an_attention_that_is_called_alone(declared):
    blocks = connect(nn.Sequential(_MlpFirst(), _MlpFirst()), "value_residual")
    blocks.blocks[0].v(torch.randn(2, 4, WIDTH))
    assert blocks.blocks[0].connections[1].made is None
    copy.deepcopy(blocks)


def test_a_branch_that_calls_its_block_is_refused_and_nothing_is_changed():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return x + self.fc(self.norm(x))

    declare_branches(Own, [lambda block, x: block(x) - x])
    blocks = nn.Sequential(Own(), Own())
    with pytest.raises(UserError, match="a branch declared for Own calls the block itself"):
        connect(blocks, "laurel", width=WIDTH)
    assert type(blocks[0]) is Own


def test_rezero_leaves_a_layer_that_wraps_another_as_it_is():
    blocks = nn.Sequential(*(Block(WIDTH, 2) for _ in range(2)))
    before = [block.attn.qkv.weight.clone() for block in blocks]
    for block in blocks:
        block.attn.qkv = Adapted(block.attn.qkv)
    x = torch.randn(2, 4, WIDTH)
    assert torch.equal(connect(blocks, "rezero")(x), x)  # the identity, at the start
    assert all(torch.equal(block.attn.qkv.base_layer.weight, weight) for block, weight in zip(blocks, before))
