"""A timm model as a StepsNet: one contract for every family, and what a plan, a stage and an error are."""

import copy

import pytest
import timm
import torch
from model_families import gradients, images
from timm.layers import DropPath
from timm.models import group_parameters, metaformer, mlp_mixer
from timm.models._features import FeatureGetterNet
from torch import nn

import stepsnet
from stepsnet import StepsNet
from stepsnet.errors import UserError
from stepsnet.models.blocks import blocks_of, step_sequences, widths_of
from stepsnet.models.build import build_model
from stepsnet.models.stepify.example import Example
from stepsnet.settings.config import ModelSpec

PLAIN = dict(img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=3, num_classes=7)
WINDOWS = dict(img_size=64, window_size=4, embed_dim=16, depths=(1, 1, 4, 1), num_heads=(1, 2, 4, 8), num_classes=7)
STAGES = dict(dims=(16, 32, 48, 64), depths=(1, 1, 4, 1), num_classes=7)
POOLED = dict(layer_scale_init_values=1e-5, res_scale_init_values=None, norm_layers=metaformer.GroupNorm1)
MIXED = dict(
    token_mixers=[metaformer.SepConv, metaformer.SepConv, metaformer.Attention, metaformer.Attention],
    norm_layers=[metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2,
)
NETS = dict(layers=(1, 1, 5, 2), channels=(16, 32, 48, 64), num_classes=7)
FAMILIES = {
    "vit": ("vit_tiny_patch16_224", PLAIN),
    "deit3": ("deit3_small_patch16_224", {**PLAIN, "drop_path_rate": 0.1}),
    "beit": ("beit_base_patch16_224", {**PLAIN, "init_values": 0.1}),
    "eva02": ("eva02_tiny_patch14_224", {**PLAIN, "embed_dim": 64, "num_heads": 4}),
    "swin": ("swin_tiny_patch4_window7_224", WINDOWS),
    "swin_v2": ("swinv2_tiny_window8_256", WINDOWS),
    "convnext": ("convnext_atto", STAGES),
    "convnextv2": ("convnextv2_atto", STAGES),
    "mixer": (mlp_mixer.MlpMixer, dict(img_size=32, patch_size=8, embed_dim=48, num_blocks=4, num_classes=7)),
    "poolformer": (metaformer.MetaFormer, {**STAGES, **POOLED}),
    "caformer": (metaformer.MetaFormer, {**STAGES, **MIXED, "dims": (16, 32, 64, 128), "depths": (1, 1, 3, 3)}),
    "resnext": ("resnext50_32x4d", {**NETS, "cardinality": 4}),
    "resnet": ("resnet18", NETS),
}
EVERY = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def plain():
    """Each family's model once; nothing may change it."""
    made = {}

    def of(family):
        if family not in made:
            torch.manual_seed(0)
            name, args = FAMILIES[family]
            made[family] = timm.create_model(name, **args) if isinstance(name, str) else name(**args)
        return made[family]

    return of


def size_of(family):
    return FAMILIES[family][1].get("img_size", 64)


def in_steps(model, family, steps=3, seed=0, **options):
    torch.manual_seed(seed)
    return stepsnet.stepify(model, steps, example=images(size_of(family)), **options)


def macs(model, family):
    return Example((torch.empty(1, 3, size_of(family), size_of(family), device="meta"),)).macs(model)


@EVERY
def test_contract(plain, family):
    model, x = plain(family), images(size_of(family))
    before = copy.deepcopy(model.state_dict())
    with torch.random.fork_rng():
        expected = model.eval()(x)

    one = in_steps(model, family, 1).eval()  # the model itself
    assert list(one.state_dict()) == list(before) and type(one) is type(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.state_dict().items())
    assert torch.equal(one(x), expected)

    ours = in_steps(model, family)
    assert isinstance(ours, type(model)) and all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert abs(macs(ours, family) / macs(model, family) - 1) < 0.05
    stepped = [sequence for sequence in step_sequences(ours) if len(sequence.widths) > 1]
    assert stepped and all(list(s.widths) == sorted(s.widths) and min(s.depths) > 0 for s in stepped)
    assert len(blocks_of(ours)) > len(blocks_of(one)) and len(widths_of(ours)) == len(blocks_of(ours))
    _check_what_is_kept(ours, before)

    ours.eval()
    y, expected_gradients = gradients(ours, x)
    assert y.shape == expected.shape and all(g is not None for g in expected_gradients.values())
    ours.set_grad_checkpointing(True)
    ours.train(model.training)
    _, recomputed = gradients(ours, x)
    for name, gradient in recomputed.items():
        torch.testing.assert_close(gradient, expected_gradients[name], msg=name)
    again = in_steps(model, family, seed=1).eval()
    again.load_state_dict(ours.state_dict())
    ours.set_grad_checkpointing(False)
    torch.testing.assert_close(again(x), y)


def _check_what_is_kept(ours, before):
    """Outside of the steps, each tensor is the model's; the new blocks are no copies of its blocks."""
    inside = tuple(name for name, module in ours.named_modules() if isinstance(module, StepsNet))
    kept = {name: tensor for name, tensor in ours.state_dict().items() if not name.startswith(inside)}
    assert kept and all(torch.equal(tensor, before[name]) for name, tensor in kept.items())
    assert all(not parameter.isnan().any() for parameter in ours.parameters())


@EVERY
def test_features_and_compilation(plain, family):
    """timm's ways into the middle of a model: intermediates, pruning, features; and the whole model as one graph."""
    model, x = plain(family).eval(), images(size_of(family))
    ours = in_steps(model, family).eval()
    final, middle = ours.forward_intermediates(x)
    torch.testing.assert_close(final, ours.forward_features(x))
    assert [m.shape for m in middle[-2:]] == [m.shape for m in model.forward_intermediates(x)[1][-2:]]
    assert len(middle) in (len(ours.feature_info), len(step_sequences(ours)))
    getter = FeatureGetterNet(copy.deepcopy(ours), out_indices=[0, 1])
    for feature, expected in zip(getter(x), ours.forward_intermediates(x, [0, 1], intermediates_only=True)):
        torch.testing.assert_close(feature, expected)
    if family in ("vit", "eva02"):  # a container that is called, and one that is looped over
        torch.testing.assert_close(torch.compile(ours, backend="eager", fullgraph=True)(x), ours(x))


@EVERY
def test_layer_decay_has_a_group_for_each_block(plain, family):
    one, ours = in_steps(plain(family), family, 1), in_steps(plain(family), family)
    if hasattr(one, "group_matcher"):  # all but MetaFormer
        before, after = (len(group_parameters(model, model.group_matcher())) for model in (one, ours))
        assert after - before == len(blocks_of(ours)) - len(blocks_of(one)) > 0


@pytest.mark.parametrize("family", ["vit", "eva02", "swin_v2", "convnext", "resnext"])
def test_the_stream_is_eq_5(plain, family):
    """A loop over a container, as EVA's and Swin-V2's models run it, is the container, and that is Eq. (5)."""
    sequence = next(s for s in step_sequences(in_steps(plain(family), family).eval()) if len(s.widths) > 1)
    shape = {1: (2, sequence.width, 16, 16), -1: (2, 16, sequence.width)}[sequence.dim]
    if family == "swin_v2":
        shape = (2, 4, 4, sequence.width)
    x = torch.randn(shape)
    z = next(iter(sequence))(torch.randn(2, 128, 32, 32)) if sequence.lead else x
    composed = z
    for block in list(sequence)[sequence.lead :]:
        composed = block(composed)
    written_out = z
    for network, width in zip(sequence.networks, sequence.widths):
        read, waiting = written_out.split([width, sequence.width - width], sequence.dim)
        written_out = torch.cat([network(read), waiting], sequence.dim)
    torch.testing.assert_close(composed, written_out)
    if not sequence.lead:
        torch.testing.assert_close(sequence(x), composed)
        scaled = in_steps(plain(family), family, stream_scale=3.0).eval()
        scaled.load_state_dict(in_steps(plain(family), family).state_dict())
        (path,) = [
            name for name, module in scaled.named_modules() if isinstance(module, StepsNet) and len(module.widths) > 1
        ]
        plain_one = in_steps(plain(family), family).eval().get_submodule(path)
        torch.testing.assert_close(scaled.get_submodule(path)(x), plain_one(3 * x))
        looped = x
        for block in scaled.get_submodule(path):
            looped = block(looped)
        torch.testing.assert_close(looped, plain_one(3 * x))


def test_new_blocks_start_as_the_librarys():
    """Per parameter the spread of a model that timm makes at that width and depth, also from a trained model."""
    torch.manual_seed(0)  # once in some ten million draws, trunc_normal_ gives its bound of 2 at any spread
    args = dict(img_size=32, patch_size=8, num_classes=7)
    wide = timm.create_model("eva02_tiny_patch14_224", embed_dim=128, depth=4, num_heads=2, **args)
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.mul_(3).add_(1)
    ours = stepsnet.stepify(wide, plan={"widths": (64, 128), "depths": (8, 0), "num_heads": (1, 2)})
    native = timm.create_model("eva02_tiny_patch14_224", embed_dim=64, depth=8, num_heads=1, **args)
    expected = dict(native.blocks.named_parameters())
    for name, parameter in ours.blocks.named_parameters():
        assert parameter.shape == expected[name].shape
        torch.testing.assert_close(parameter.std(), expected[name].std(), rtol=0.1, atol=1e-3)
        torch.testing.assert_close(parameter.mean(), expected[name].mean(), rtol=0, atol=2e-2)
    trained = timm.create_model("convnext_atto", **STAGES)
    nn.init.normal_(trained.stages[2].blocks[1].gamma)
    scales = [block.gamma for block in stepsnet.stepify(trained, stages=[3]).stages[2].blocks]
    assert all(bool((scale == 1e-6).all()) for scale in scales)


@pytest.mark.parametrize("name", ["mobilevit_xxs", "mobilevitv2_050", "inception_next_tiny"])
def test_new_blocks_start_as_the_models_own_function_or_its_file_starts_them(name):
    """Those of the full width, beside the ones in whose place they stand; each model as timm makes it."""
    torch.manual_seed(0)
    plain = timm.create_model(name, num_classes=7)
    ours, compared = stepsnet.stepify(plain, steps=2), 0
    for path, sequence in ours.named_modules():
        if type(sequence).__name__ != "StepSequence" or len(sequence.widths) < 2:
            continue
        for name, parameter in sequence[-1].named_parameters():
            before = plain.get_submodule(path)[-1].get_parameter(name)
            assert parameter.shape == before.shape
            if parameter.numel() > 1000 or not before.any():
                torch.testing.assert_close(parameter.std(), before.std(), rtol=0.15, atol=1e-6)
                compared += 1
    assert compared


def test_a_stage_without_blocks_that_keep_their_width_counts():
    """Numbers are those of the model's stages: the only block of the third one halves the resolution."""
    model = timm.create_model("resnet18", layers=(2, 3, 1, 3), channels=(16, 16, 32, 48))
    stepped = stepsnet.stepify(model, 2, stages=(2, 4))
    layers = [stepped.layer1, stepped.layer2, stepped.layer3, stepped.layer4]
    assert [[len(one.depths) for one in step_sequences(layer)] for layer in layers] == [[1], [2], [], [2]]
    with pytest.raises(
        UserError, match=r"stages: got \(3,\), expected some of 1, 2, 4, the stages with blocks of one kind"
    ):
        stepsnet.stepify(model, 2, stages=(3,))


def test_the_original_shares_nothing_with_the_result():
    """Nor do blocks among themselves: a hook, say, would be of all of them."""
    plain = timm.create_model("deit_tiny_patch16_224", img_size=32, depth=2)
    result = stepsnet.stepify(plain, steps=2)
    modules = [*plain.modules(), *result.modules()]
    for name in ("_forward_hooks", "_parameters", "_modules", "_buffers"):
        assert len({id(getattr(module, name)) for module in modules}) == len(modules), name


def test_options_of_blocks_are_kept():
    """Stochastic depth is spread again over the new depth; windows go on to alternate; each dropout keeps its rate."""
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", **{**WINDOWS, "depths": (1, 1, 5, 1), "window_size": 2}, drop_path_rate=0.2
    )
    originals, blocks = list(model.layers[2].blocks), list(stepsnet.stepify(model, stages=[3]).layers[2].blocks)
    assert [any(block.shift_size) for block in blocks] == [bool(i % 2) for i in range(len(blocks))]
    rates = [block.drop_path2.drop_prob for block in blocks]
    assert rates[0] == originals[0].drop_path1.drop_prob and rates[-1] == originals[-1].drop_path1.drop_prob
    steps = torch.tensor(rates).diff()
    torch.testing.assert_close(steps, steps.mean().expand(len(steps)))
    deit = timm.create_model("deit3_small_patch16_224", **PLAIN, drop_path_rate=0.1, proj_drop_rate=0.3)
    first, *others = stepsnet.stepify(deit).blocks
    assert isinstance(first.drop_path1, nn.Identity) and all(isinstance(b.drop_path1, DropPath) for b in others)
    assert first.attn.proj_drop.p == 0.3


def test_profiles_and_explicit_plans():
    def steps_of(**options):
        return (sequence := stepsnet.stepify("vit_tiny_patch16_224", **PLAIN, **options).blocks).widths, sequence.depths

    widths, depths = steps_of()
    assert widths == (24, 34, 48)
    assert steps_of(profile="reverse") == (widths[::-1], depths[::-1])
    bow_tie, waist = steps_of(profile="bowtie")
    assert bow_tie == (48, 34, 48) and len(waist) == 3
    assert steps_of(round_to=8)[0] == (24, 32, 48)
    planned = stepsnet.plan_steps(48, 4, 3, head_dim=16)
    assert steps_of(plan=planned) == (planned.widths, planned.depths)
    planned = stepsnet.plan_steps(width=160, depth=6, steps=3)  # has heads, which these blocks have not
    assert stepsnet.stepify("convnext_atto", plan=planned, stages=[3]).stages[2].blocks.widths == planned.widths
    assert sum(steps_of(blocks=8)[1]) == 8
    assert steps_of(plan={"widths": (16, 48), "depths": (2, 3), "num_heads": [1, 3]}) == ((16, 48), (2, 3))
    assert steps_of(match="params")[0] == widths
    swin = stepsnet.stepify("swin_tiny_patch4_window7_224", stages=(3, 4))  # Table 14
    assert [sequence.depths for sequence in step_sequences(swin)] == [(2,), (2,), (6, 3, 3), (2, 1, 1)]
    assert stepsnet.stepify("deit_small_patch16_224").blocks.depths == (12, 6, 6)  # Table 13


def test_a_recipe_says_it():
    spec = ModelSpec("stepify", {"model": "convnext_atto", "steps": 2, "num_classes": 5, "depths": (1, 1, 3, 1)})
    model = build_model(spec)
    assert model.num_classes == 5 and any(len(sequence.widths) == 2 for sequence in step_sequences(model))
    with torch.device("meta"):
        assert next(build_model(spec).parameters()).device.type == "meta"
    with pytest.raises(UserError, match=r"args.model: got None"):
        build_model(ModelSpec("stepify", {}))
    with pytest.raises(UserError, match="got 'None', expected a model, or the name of one"):
        stepsnet.stepify(None)
    with pytest.raises(UserError, match=r"got 'gpt2', expected a timm model, causal_lm or transformers:gpt2$"):
        stepsnet.stepify("gpt2")
    with pytest.raises(UserError, match="did you mean convnext_atto"):
        build_model(ModelSpec("stepify", {"model": "convnext_ato"}))


class Own(nn.Module):
    """A block of nobody's, whose constructor takes more than its width."""

    def __init__(self, width, factor):
        super().__init__()
        self.fc, self.factor = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)), factor

    def forward(self, x):
        return x + self.factor * self.fc(x)


class Plain(Own):
    def __init__(self, width):
        super().__init__(width, 1.0)


def test_blocks_of_ones_own():
    x = torch.randn(2, 5, 32)
    net = nn.Sequential(
        nn.Linear(32, 32), nn.ModuleDict({"body": nn.Sequential(*(Plain(32) for _ in range(4)))})["body"]
    )
    ours = stepsnet.stepify(net, example=x)  # the constructor takes the width plainly
    assert isinstance(ours[1], StepsNet) and ours[1].widths == (16, 24, 32) and ours(x).shape == x.shape
    assert torch.equal(stepsnet.stepify(net, 1, example=x)(x), net(x))
    with pytest.raises(UserError, match="holds one block several times, expected blocks with weights of their own"):
        stepsnet.stepify(nn.Sequential(*[Plain(32)] * 4), example=x)
    own = nn.Sequential(*(Own(32, 0.5) for _ in range(4)))
    with pytest.raises(UserError, match=r"4 blocks of Own, which has no adapter.*register_block\(Own, rebuild\)"):
        stepsnet.stepify(own, example=x)
    stepsnet.register_block(Own, lambda block, width, heads: Own(width, block.factor), branches=["fc factor"])
    ours = stepsnet.stepify(own.double(), example=x.double())
    assert {block.factor for block in ours} == {0.5} and ours(x.double()).dtype == torch.float64
    (branch,) = stepsnet.branches_of(own[0])
    torch.testing.assert_close(branch(x.double()), 0.5 * own[0].fc(x.double()))


WRONG = [
    ("vgg11", {}, "VGG has no container of blocks of one kind"),
    (
        "mambaout_femto",
        {"drop_path_rate": 0.1},
        "stages.2.blocks holds 9 blocks of GatedConvBlock, which has no adapter",
    ),
    ("efficientnet_b0", {}, "blocks.5 holds 4 blocks of InvertedResidual, which has no adapter"),
    (
        "swin_tiny_patch4_window7_224",
        dict(stages=(3, 5)),
        r"stages: got \(3, 5\), expected some of 1, 2, 3, 4,",
    ),
    (
        "convnext_atto",
        dict(steps=9),
        "steps: got 9, expected at most the blocks of the deepest stage; the stages have 2, 2, 6, 2",
    ),
    ("eva02_tiny_patch14_224", dict(round_to=0), "round_to: got 0, expected 'heads' or a whole number of at least 1"),
    ("vit_tiny_patch16_224", dict(steps=1, round_to="x"), "round_to: got 'x', expected 'heads' or a whole number"),
    ("vit_tiny_patch16_224", dict(steps=0), "steps: got 0, expected a whole number of at least 1"),
    ("vit_tiny_patch16_224", dict(steps=2, profile="bowtie"), "expected an odd number for a bow-tie"),
    (
        "vit_tiny_patch16_224",
        dict(plan=dict(widths=(96, 128), depths=(2, 2))),
        "expected the widest to be the stream's 192",
    ),
    ("vit_tiny_patch16_224", dict(plan=dict(widths=(96, 192))), "plan: got widths, expected widths and depths"),
    ("vit_tiny_patch16_224", dict(plan=dict(widths=(96, 192), depths=(2, 2), num_heads=(5, 3))), "expected a divisor"),
    (
        "vit_tiny_patch16_224",
        dict(plan=dict(widths=(192,), depths=(12,), num_heads=(6,))),
        "num_heads: got 6 at width 192, expected 3, as in the model; plan_steps gives this number with head_dim=64",
    ),
    (
        "swin_tiny_patch4_window7_224",
        dict(plan=stepsnet.plan_steps(384, 6, 3), stages=(3,)),
        "num_heads: got 6 at width 384, expected 12, as in the model; plan_steps .* head_dim=32",
    ),
    ("eva02_tiny_patch14_224", dict(plan=dict(widths=(100, 192), depths=(2, 2))), "got 100, expected a multiple of 64"),
    ("eva02_tiny_patch14_224", dict(steps=5), "too many for width 192 in multiples of 64, the head size"),
    ("vit_small_patch16_rope_mixed_224", {}, "EvaBlock does not run at width 192 with what the model gives its blocks"),
    (
        "vit_small_patch16_rope_mixed_224",
        dict(plan=dict(widths=(384,), depths=(14,))),
        "Eva does not run with its blocks in steps, since a part of it is made for its old number of blocks or heads",
    ),
    ("vit_tiny_patch16_224", dict(steps="3"), "steps: got '3', expected a whole number"),
    ("vit_tiny_patch16_224", dict(stages="1"), "stages: got '1', expected a list of numbers"),
    ("vit_tiny_patch16_224", dict(stages=["a"]), "stages: got 'a' in the list, expected only whole numbers"),
    ("vit_tiny_patch16_224", dict(plan=3), "plan: got 3, expected widths and depths"),
    ("vit_tiny_patch16_224", dict(plan=dict(widths=None, depths=None)), "plan: widths: got None, expected a list"),
    ("vit_tiny_patch16_224", dict(plan=dict(widths=(192,), depths=(0,))), "expected at least one block"),
    ("vit_tiny_patch16_224", dict(stream_scale=float("nan")), "stream_scale: got nan, expected a number from"),
    ("vit_tiny_patch16_224", dict(example=3), "example: got int, expected a batch"),
    ("vit_tiny_patch16_224", dict(depth=10**6), "depth: got 1000000, expected 1 to 10,000 blocks"),
    ("vit_tiny_patch16_224", dict(match="flops"), "match: got 'flops', expected macs or params"),
    ("vit_tiny_patch16_224", dict(width=3), "model vit_tiny_patch16_224: .*width"),
]


@pytest.mark.parametrize(("name", "options", "said"), WRONG, ids=[said[:40] for *_, said in WRONG])
def test_bad_input_is_one_line(name, options, said):
    with pytest.raises(UserError, match=said) as raised, torch.device("meta"):
        stepsnet.stepify(name, **options)
    assert "\n" not in str(raised.value)


def test_a_resnet_without_values_is_put_in_steps():
    with torch.device("meta"):
        stepped = stepsnet.stepify(timm.create_model("resnet18"), steps=2)
    there = stepsnet.stepify(timm.create_model("resnet18"), steps=2)
    shapes = [{name: value.shape for name, value in net.state_dict().items()} for net in (stepped, there)]
    assert shapes[0] == shapes[1] and all(parameter.is_meta for parameter in stepped.parameters())


def test_a_block_that_changes_the_stream_in_the_middle():
    class Halving(Plain):
        def forward(self, x):
            return super().forward(x)[:, ::2] if self.factor == 2.0 else super().forward(x)

    net = nn.Sequential(*(Halving(32) for _ in range(4)))
    net[2].factor = 2.0
    with pytest.raises(UserError, match=r"2 \(Halving\) changes the width or the resolution of the stream"):
        stepsnet.stepify(net, example=torch.randn(2, 8, 32))
    with pytest.raises(UserError, match="Sequential is not a timm model, expected example="):
        stepsnet.stepify(net)
    with pytest.raises(UserError, match="does not take the example input"):
        stepsnet.stepify(net, example=torch.randn(2, 8, 31))
