"""stepify's options and what they are refused for; models that are frozen, in bfloat16, or in steps already."""

import math

import pytest
import timm
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import stepsnet
from stepsnet.cli import main
from stepsnet.errors import UserError
from stepsnet.models.build import build_model
from stepsnet.settings.config import ModelSpec

VIT = dict(img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=3, num_classes=7)
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def vit():
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **VIT).eval()


def test_the_scale_of_the_stream_is_the_originals_too():
    """With one step and a scale: the same weights behind a larger stream, a baseline for what has it in steps."""
    model = vit()
    scaled = stepsnet.stepify(model, 1, stream_scale=3.0)
    assert scaled.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(scaled.blocks(torch.ones(1, 2, 48)), model.blocks(3 * torch.ones(1, 2, 48)))
    assert torch.equal(stepsnet.stepify(model, 1)(IMAGES), model(IMAGES))


def test_a_model_in_bfloat16_and_one_that_is_frozen():
    ours = stepsnet.stepify(vit().bfloat16(), 2)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    assert ours(IMAGES.bfloat16()).dtype == torch.bfloat16
    for make in (stepsnet.stepify, stepsnet.grow):
        in_32_bits, ours = make(vit(), 2), make(vit().bfloat16(), 2)
        for (name, expected), found in zip(in_32_bits.named_parameters(), ours.parameters()):
            if name.startswith("blocks.") and expected.ndim == 2:  # drawn in float32: none is far out
                assert found.float().std().item() == pytest.approx(expected.std().item(), rel=0.1, abs=1e-6), name
                assert found.float().abs().max() < 8 * expected.std().clamp(min=1e-6), name
    # whose head reads the new channels by zeros, which have to learn
    for make, outside in ((stepsnet.stepify, set()), (stepsnet.grow, {"norm.1.weight", "norm.1.bias", "head.weight"})):
        frozen = vit().requires_grad_(False)
        result = make(frozen, 2)
        new = [name for name, parameter in result.named_parameters() if parameter.requires_grad]
        assert {name for name in new if not name.startswith("blocks.")} == outside and len(new) > len(outside), make


def test_what_is_in_steps_already_is_refused():
    connected = vit()
    connected.blocks = stepsnet.residual.connect(connected.blocks, "mhc")
    for model in (stepsnet.stepify(vit(), 2), timm.create_model("test_steps_deit"), connected):
        with pytest.raises(UserError, match=r"blocks is in steps already, or in a design of the residual stream"):
            stepsnet.stepify(model, 2, example=IMAGES)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("design", ["layer_scale", "mhc"])
def test_a_design_is_what_connect_makes_of_the_steps(steps, design):
    model = vit()
    torch.manual_seed(0)
    ours = stepsnet.stepify(model, steps, residual=design)
    torch.manual_seed(0)
    by_hand = stepsnet.stepify(model, steps)
    by_hand.blocks = stepsnet.residual.connect(by_hand.blocks, design)
    torch.testing.assert_close(ours(IMAGES), by_hand(IMAGES), rtol=0, atol=0)
    assert ours.state_dict().keys() == by_hand.state_dict().keys() > stepsnet.stepify(model, steps).state_dict().keys()
    again = stepsnet.stepify(vit(), steps, residual=design)
    again.load_state_dict(ours.state_dict())
    torch.testing.assert_close(again(IMAGES), ours(IMAGES), rtol=0, atol=0)
    assert not any("connections" in name for name, _ in model.named_modules())  # it is not changed


def test_blocks_in_a_design_are_counted_through_all_stages():
    args = dict(img_size=64, embed_dim=16, depths=(1, 1, 3, 1), num_heads=(1, 1, 2, 2), num_classes=7)
    model = timm.create_model("swin_tiny_patch4_window7_224", **args)
    whole = stepsnet.stepify(model, 2, residual="complete_p")  # each branch over the number of blocks, in all stages
    scales = [part.factor for part in whole.modules() if type(part).__name__ == "CompleteP"]
    blocks = [len(stage.blocks) for stage in whole.layers]
    assert sum(blocks) > 6 and len(scales) == 2 * sum(blocks) and set(scales) == {1 / sum(blocks)}
    third = stepsnet.stepify(model, 2, residual="complete_p", stages=(3,))
    joined = {name.split(".")[1] for name, part in third.named_modules() if type(part).__name__ == "CompleteP"}
    assert joined == {"2"}


def test_a_design_that_does_not_fit_is_refused():
    for name, design, options, said in (
        ("convnext_atto", "mhc", None, "stages.0.blocks: residual: got blocks with channels in dimension 1"),
        ("vit_tiny_patch16_224", "mhcc", None, "residual: got 'mhcc', .*did you mean mhc"),
        ("vit_tiny_patch16_224", "mhc", {"stream": 2}, "mhc got the option 'stream', .*did you mean streams"),
        ("vit_tiny_patch16_224", "plain", {"streams": 2}, "plain got the option 'streams'"),
        ("vit_tiny_patch16_224", "mhc", 2, "residual_options: got 2, expected a mapping"),
    ):
        with pytest.raises(UserError, match=said):
            stepsnet.stepify(name, 2, residual=design, residual_options=options)
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    llama = transformers.LlamaForCausalLM(config)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2))
    for model, said in (
        (
            llama,
            r"for LlamaForCausalLM, expected plain: .*connect\(model.model.layers, …\), or steps_transformer with a",
        ),
        (gpt2, r"for GPT2LMHeadModel, expected plain: .*connect\(model.transformer.h, …\)$"),
    ):
        with pytest.raises(UserError, match=f"residual: got 'mhc' {said}"):
            stepsnet.stepify(model, 2, residual="mhc")


def test_an_option_of_the_design_beside_those_of_stepify_is_said_to_be_one():
    hint = r" \(for an option of the design: residual_options={'streams': 2}\)$"
    for model, said in (("test_vit", "unknown argument 'streams'.*"), (vit(), "got streams with a built model.*")):
        with pytest.raises(UserError, match=said + hint):
            stepsnet.stepify(model, 1, residual="mhc", streams=2)
        with pytest.raises(UserError, match=r"streams.*[^)]$"):
            stepsnet.stepify(model, 1, residual="laurel", streams=2)


def test_options_of_the_search_beside_a_plan_are_refused(capsys):
    plan = {"widths": (32, 48), "depths": (2, 2)}
    for given in (dict(match="params"), dict(profile="reverse"), dict(blocks=5), dict(round_to=16)):
        with pytest.raises(UserError, match=f"{next(iter(given))}: got it together with a plan"):
            stepsnet.stepify(vit(), plan=plan, **given)
    arguments = ["vit_tiny_patch16_224", *(f"{key}={value}" for key, value in VIT.items())]
    assert main(["stepify", *arguments, "--widths", "16,48", "--depths", "2,3", "--match", "params"]) == 2
    assert "--match: got it beside a plan" in capsys.readouterr().err


class Activated(nn.Module):
    """A block whose constructor takes its width, and an option that is no number."""

    def __init__(self, width, act=F.relu):
        super().__init__()
        self.fc, self.act = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)), act

    def forward(self, x):
        return x + self.act(self.fc(x))


class Along(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inside = nn.Sequential(nn.BatchNorm1d(width), nn.Conv1d(width, width, 3, padding=1))

    def forward(self, x):
        return x + self.inside(x)


def test_an_option_of_a_block_is_not_lost():
    x = torch.randn(2, 5, 32)
    assert stepsnet.stepify(nn.Sequential(*(Activated(32) for _ in range(4))), 2, example=x)(x).shape == x.shape
    with pytest.raises(UserError, match="4 blocks of Activated, which has no adapter"):
        stepsnet.stepify(nn.Sequential(*(Activated(32, F.gelu) for _ in range(4))), 2, example=x)


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Activated(32) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x=x)
        return x


class OfFixedDepth(ByKeyword):
    def forward(self, x):
        for i in range(4):
            x = self.layers[i](x)
        return x


class Summed(ByKeyword):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + x
        return x


class Tapped(ByKeyword):
    """Feature maps from fixed places, as a dense head takes them."""

    places = (1, 3)

    def forward(self, x):
        taken = []
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i in self.places:
                taken.append(x)
        return torch.cat(taken, -1) if len(taken) > 1 else taken[0]


class ReturnedEarly(Tapped):
    places = (3,)


class ReturnedWhole(ByKeyword):
    def forward(self, x):
        every = []
        for layer in self.layers:
            x = layer(x)
            every.append(x)
        return every


class Unsummed(ByKeyword):
    """Layers that are not residual."""

    class Block(Activated):
        def forward(self, x):
            return self.act(self.fc(x))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Block(32) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Experts(ByKeyword):
    """Side by side."""

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


class Tied(ByKeyword):
    """What a block holds is used elsewhere too."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, 32)
        self.head.weight = self.layers[2].fc[1].weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class NormedBetween(ByKeyword):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        for layer in self.layers:
            x = self.norm(layer(x))
        return x


class WithPositions(ByKeyword):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x + 0.1)
        return x


class ChangedInPlace(ByKeyword):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).mul_(0.5)
        return x


class Reshaped(ByKeyword):
    """Its blocks get the values that the one before has returned."""

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x.flatten(0, 1), use_reentrant=False).view(x.shape).mT.mT.roll(1, 1)
            x = F.dropout(F.pad(x, (0, 0, 0, 1))[:, :-1], 0.1, self.training)
        return x


class Writing(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        x += self.fc(x)
        return x


class InPlace(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(32, 32), nn.Sequential(*(Writing(32) for _ in range(4))))


@pytest.mark.parametrize(
    "kind, words",
    [
        (
            InPlace,
            r"1.0 \(Writing\) writes into its input, whose memory the rest of the stream would share, expected x = x",
        ),
        (Experts, "layers.1 gets the same input as another block of layers, expected blocks in a row"),
        (Tied, "Tied.head.weight is also a parameter of the blocks in layers, expected blocks with weights of their"),
        (Tapped, r"Tapped reads its stream after some blocks of layers \(1\), which are other places in steps"),
        (
            ReturnedEarly,
            "ReturnedEarly makes no use of layers.4 to layers.5 of its 6 blocks: it reads its stream where",
        ),
        (Unsummed, r"layers.0 \(Block\) multiplies its whole input by weights, expected blocks that return x"),
        (
            OfFixedDepth,
            "OfFixedDepth never runs layers.4 to layers.5 of its 6 blocks: it runs only as many as it had before",
        ),
        (
            Summed,
            r"Summed adds what goes into layers.0 \(Activated\) to what comes out of it, expected blocks that return",
        ),
        *(
            (kind, r"layers.1 \(Activated\) does not get what the block before it returns: .* blocks in a row")
            for kind in (NormedBetween, WithPositions, ChangedInPlace)
        ),
    ],
)
def test_models_whose_blocks_would_be_silently_wrong_are_refused(kind, words):
    """The blocks of later steps would never run; the channels that wait would be doubled by each block."""
    with pytest.raises(UserError, match=words):
        stepsnet.stepify(kind(), 2, example=torch.randn(2, 5, 32), plan={"widths": (16, 32), "depths": (4, 2)})


def test_a_stream_may_change_its_shape_between_blocks():
    x = torch.randn(2, 5, 32)
    assert stepsnet.stepify(Reshaped(), 2, example=x)(x).shape == x.shape


def test_layers_that_are_not_residual_are_left_out_where_others_are():
    """And the others keep their numbers."""

    class Both(Unsummed):
        def __init__(self):
            super().__init__()
            self.others = nn.Sequential(*(Activated(32) for _ in range(4)))

        def forward(self, x):
            return self.others(super().forward(x))

    x = torch.randn(2, 5, 32)
    model = stepsnet.stepify(Both(), 2, stages=(1,), example=x)
    assert isinstance(model.others, stepsnet.StepsNet) and type(model.layers) is nn.ModuleList
    assert model(x).shape == x.shape
    with pytest.raises(UserError, match="expected some of 1, the stages with blocks of one kind"):
        stepsnet.stepify(Both(), 2, stages=(2,), example=x)


class Counting(nn.Module):
    """Counts its passes in a parameter that takes no gradient."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Activated(32) for _ in range(4)))
        self.count = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x):
        self.count += 1
        return self.layers(x)


def test_a_model_that_writes_into_a_parameter_without_a_gradient_is_taken():
    x = torch.randn(2, 5, 32)
    model = stepsnet.stepify(Counting(), 2, example=x)
    assert model(x).shape == x.shape and model.count == 1


def test_a_model_that_reads_its_stream_behind_each_block_is_taken():
    x = torch.randn(2, 5, 32)
    every = stepsnet.stepify(ReturnedWhole(), 2, example=x)(x)
    assert len(every) > 4 and {one.shape for one in every} == {x.shape}
    model = Tapped()
    assert torch.equal(stepsnet.stepify(model, 1, example=x)(x), model(x))  # where nothing changes place


@pytest.mark.parametrize("where", ["before", "behind"])
def test_a_norm_on_the_stream_itself_is_no_reason_to_refuse_a_block(where):
    """Post-norm, and a shortcut through a batch norm, as RepVGG has."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, width)

        def forward(self, x):
            return self.norm(x) + self.fc(x) if where == "before" else self.norm(x + self.fc(x))

    x = torch.randn(2, 5, 32)
    assert stepsnet.stepify(nn.Sequential(*(Block(32) for _ in range(4))), 2, example=x)(x).shape == x.shape


def test_blocks_that_are_called_by_keyword_are_refused():
    with pytest.raises(UserError, match=r"layers.0 \(Activated\) gets its input by keyword, expected it as the first"):
        stepsnet.stepify(ByKeyword(), 2, example=torch.randn(2, 5, 32))


def test_blocks_that_return_more_than_the_stream_are_refused():
    class WithWeights(Activated):
        def forward(self, x):
            return super().forward(x), x.mean()

    class OfTuples(ByKeyword):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(WithWeights(32) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x, _ = layer(x)
            return x

    with pytest.raises(UserError, match=r"layers.0 \(WithWeights\) returns a tuple, expected one tensor"):
        stepsnet.stepify(OfTuples(), 2, example=torch.randn(2, 5, 32))


def test_convolutions_along_a_line_have_their_channels_in_front():
    x = torch.randn(2, 32, 9)
    ours = stepsnet.stepify(nn.Sequential(*(Along(32) for _ in range(4))), 2, example=x)
    assert (ours.width, ours.dim) == (32, 1) and ours(x).shape == x.shape


class Noting(Activated):
    """A block that keeps a table it has made and what it has seen."""

    def __init__(self, width):
        super().__init__(width)
        self.table = self.last = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(x.shape[1], 1, device=x.device)
        self.last = x.detach()
        return super().forward(x * self.table)


def test_the_given_model_is_not_changed_and_its_hooks_see_no_trace():
    x, seen = torch.randn(2, 5, 32), []
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(*(Noting(32) for _ in range(4))))
    model[1].register_forward_hook(lambda *given: seen.append(given[-1].device.type))
    ours = stepsnet.stepify(model, 2, example=x)
    assert all(block.table is None and block.last is None for block in (*model[1], *ours[1].blocks)) and not seen
    assert ours(x).shape == x.shape and seen == ["cpu"]  # the container's hook is on what takes its place


def test_modules_keep_their_own_modes():
    """Frozen norms in a stage that stays; a block in evaluation mode, also where a part of the blocks is taken."""
    nets = timm.create_model("resnet18", layers=(3, 2, 1, 1), channels=(16, 32, 48, 64))
    for module in nets.layer2.modules():
        module.training = not isinstance(module, nn.BatchNorm2d)
    for ours in (stepsnet.stepify(nets, 2, stages=(1,)), stepsnet.stepify(nets, 1)):
        norms = [module for module in ours.layer2.modules() if isinstance(module, nn.BatchNorm2d)]
        assert norms and not any(norm.training for norm in norms)
        assert ours.layer1.training and all(block.training for block in ours.layer1.blocks)
    model = vit().train()
    model.blocks[0].eval()
    grown, ours = stepsnet.grow(model, 2), stepsnet.stepify(model, 2)
    assert [block.training for block in grown.blocks.blocks] == [False] + [True] * (len(grown.blocks) - 1)
    steps = stepsnet.StepsNet([nn.Sequential(nn.Linear(3, 3).eval())], [3])
    ours.blocks.blocks[0].eval()
    for sequence, first in ((ours.blocks, ours.blocks.blocks[0]), (steps, steps.networks[0][0])):
        assert sequence[:1].training and not first.training


def test_an_option_of_a_later_block_and_shared_weights_are_not_lost():
    x = torch.randn(2, 5, 32)
    with pytest.raises(UserError, match="4 blocks of Activated, which has no adapter"):
        stepsnet.stepify(nn.Sequential(*(Activated(32, F.gelu if i else F.relu) for i in range(4))), 2, example=x)
    blocks = [Activated(32) for _ in range(4)]
    blocks[2].fc = blocks[0].fc
    with pytest.raises(UserError, match="parameters that its blocks share, expected blocks with weights of their own"):
        stepsnet.stepify(nn.Sequential(*blocks), 2, example=x)


def test_rates_of_ones_own_blocks_are_spread():
    class Rated(Activated):
        def __init__(self, width, rate):
            super().__init__(width)
            self.rate = rate

    stepsnet.register_block(Rated, lambda block, width, heads: Rated(width, block.rate))
    net = nn.Sequential(*(Rated(32, i / 10) for i in range(4)))
    ours = stepsnet.stepify(net, plan={"widths": (16, 32), "depths": (4, 2)}, example=torch.randn(2, 5, 32))
    assert [block.rate for block in ours.blocks] == pytest.approx([0, 0.06, 0.12, 0.18, 0.24, 0.3])
    for i, block in enumerate(net):
        block.rate = 0.8 - 0.6 * math.exp(-0.3 * i)  # a factor of the depth, which is no rate
    factors = [block.rate for block in net]
    ours = stepsnet.stepify(net, plan={"widths": (16, 32), "depths": (4, 2)}, example=torch.randn(2, 5, 32))
    assert [block.rate for block in ours.blocks] == [factors[i] for i in (0, 1, 1, 2, 2, 3)]
    for i, block in enumerate(net):
        block.rate, block.kept = i / 10, 1 - i / 10 if i else [1.0]  # which a new rate would not change
    ours = stepsnet.stepify(net, plan={"widths": (16, 32), "depths": (4, 2)}, example=torch.randn(2, 5, 32))
    assert [block.rate for block in ours.blocks] == [i / 10 for i in (0, 1, 1, 2, 2, 3)]


class Wrapped(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, x):
        return self.backbone(x)


def test_new_blocks_of_a_model_inside_of_another_start_as_its_own():
    nets = dict(layers=(1, 1, 4, 1), channels=(16, 32, 48, 64))
    for make in (vit, lambda: timm.create_model("resnet18", **nets)):
        alone, inside = (stepsnet.stepify(model, 2, example=IMAGES) for model in (make(), Wrapped(make())))
        for (name, one), other in zip(alone.named_parameters(), inside.backbone.parameters()):
            torch.testing.assert_close(one.std(), other.std(), rtol=0.2, atol=1e-3, msg=name)
    listed = timm.create_model("resnet18", features_only=True, **nets)  # whose class is no ResNet
    assert stepsnet.stepify(listed, 2, example=IMAGES)(IMAGES)[-1].shape[1] == 64
    # around which there is nothing of timm's: as their constructor has them, which is torch's start of a Linear
    bare = nn.Sequential(nn.Linear(9, 48), vit().blocks)
    first = stepsnet.stepify(bare, 2, example=torch.randn(1, 5, 9))[1][0].attn.qkv.weight
    torch.testing.assert_close(first.std(), torch.tensor((3 * first.shape[1]) ** -0.5), rtol=0.1, atol=0)


class Around(nn.Module):
    """A model of one's own around a library's."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        found = self.inner(x)
        return getattr(found, "logits", found)


def small_llama():
    sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


@pytest.mark.parametrize("make", [small_llama, lambda: timm.create_model("test_vit")], ids=["llama", "vit"])
def test_the_model_inside_of_another_is_named(make):
    expected = (
        r"Around is not a timm model, expected the model inside of it, model.get_submodule\('inner'\), or example="
    )
    with pytest.raises(UserError, match=expected):
        stepsnet.stepify(Around(make()))
    with pytest.raises(UserError, match=r"expected the model inside of it, model.get_submodule\('0'\)"):
        stepsnet.stepify(nn.Sequential(make(), nn.ReLU()))


def test_layers_of_transformers_in_another_model_are_named():
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(UserError, match=r"inner.model.layers holds 4 layers of transformers .*by itself"):
        stepsnet.stepify(Around(small_llama()), example=tokens)
    x = torch.randn(2, 3, 160, 160)  # timm's blocks are known anywhere
    assert stepsnet.stepify(Around(timm.create_model("test_vit")), steps=2, example=x)(x).shape == (2, 1000)


@pytest.mark.parametrize("make", [small_llama, lambda: timm.create_model("test_vit")], ids=["llama", "vit"])
def test_adapters_of_peft_are_refused(make):
    peft = pytest.importorskip("peft")
    model = make()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "qkv"]))
    with pytest.raises(UserError, match="stepify: PeftModel is a module of PEFT, expected the model without adapters"):
        stepsnet.stepify(wrapped)
    for convert in (stepsnet.stepify, stepsnet.grow):
        refused = rf"{convert.__name__}: {type(model).__name__}.*(q_proj|qkv) is a module of PEFT"
        with pytest.raises(UserError, match=refused):
            convert(model)
    assert stepsnet.stepify(wrapped.merge_and_unload(), steps=2)


def test_a_tensor_without_a_role_has_its_path():
    model = timm.create_model("test_vit")
    for block in model.blocks:
        block.attn.extra = nn.Linear(7, 7)
    with pytest.raises(UserError, match=r"^stepify: blocks: attn.extra.weight: got a tensor of shape \(7, 7\), but"):
        stepsnet.stepify(model)


def test_features_of_some_blocks_are_taken_in_steps():
    with pytest.raises(UserError, match="; or stepify the model without features_only, and call its forward_in"):
        stepsnet.stepify(timm.create_model("vit_tiny_patch16_224", features_only=True))
    ours = stepsnet.stepify(timm.create_model("vit_tiny_patch16_224", img_size=32))
    x, last = torch.randn(1, 3, 32, 32), len(ours.blocks) - 1
    maps = ours.forward_intermediates(x, indices=[3, last], intermediates_only=True)
    assert [tuple(one.shape) for one in maps] == [(1, 192, 2, 2)] * 2


def test_a_model_of_a_folder(tmp_path):
    original = timm.create_model("test_vit", num_classes=7)
    timm.models.save_for_hf(original, str(tmp_path))
    name = f"local-dir:{tmp_path}"
    ours = stepsnet.stepify(name, steps=2)
    assert ours.num_classes == 7 and torch.equal(
        stepsnet.stepify(name, steps=1, pretrained=True).head.weight, original.head.weight
    )
    with pytest.raises(UserError, match="model local-dir:/nowhere: Config file not found"):
        stepsnet.stepify("local-dir:/nowhere")
    assert build_model(ModelSpec(name, {"img_size": 32})).patch_embed.img_size == (32, 32)  # as a recipe names it
