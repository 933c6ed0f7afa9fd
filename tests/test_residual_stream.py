"""What the residual stream carries after each block, against formulas written out."""

import gc
import json
import math
import weakref
from types import SimpleNamespace

import pytest
import timm
import torch
from timm.models.vision_transformer import Block
from torch import nn

from stepsnet.analysis.block_statistics import as_line, read_line, statistics_of
from stepsnet.analysis.residual_stream import measure_stream
from stepsnet.engine.task import BatchShard
from stepsnet.errors import UserError
from stepsnet.models.blocks import blocks_of, step_sequences
from stepsnet.models.build import build_model
from stepsnet.models.compilation import compile_blocks
from stepsnet.models.stepify.convert import stepify
from stepsnet.models.steps_transformer import create
from stepsnet.output.console import Lines
from stepsnet.recipes import find_recipe
from stepsnet.residual import DESIGNS, connect
from stepsnet.runs.train import train_run
from stepsnet.settings.config import ModelSpec
from stepsnet.settings.overrides import override
from stepsnet.tasks import build_task

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def loss(model):
    return model(IMAGES).square().mean()


def steps_deit(**kwargs):
    torch.manual_seed(0)
    args = {"widths": (24, 34, 48), "depths": (2, 2, 1), "num_heads": (2, 2, 3), "img_size": 32, **kwargs}
    return timm.create_model("test_steps_deit", **args).eval()


def deit():
    return steps_deit(widths=(48,), depths=(3,), num_heads=(3,))


class Own(nn.Module):
    """A StepsNet of the user's own, which keeps its settings under the names that a StepsNet gives them."""

    def __init__(self, **args):
        super().__init__()
        self.net = steps_deit(**args)
        self.config = SimpleNamespace(widths=(24, 34, 48), depths=(2, 2, 1))

    def forward(self, x):
        return self.net(x)


def sigma(z, dim):
    """The standard deviation over the channels of each token, averaged."""
    mean = z.mean(dim, keepdim=True)
    return ((z - mean).square().sum(dim) / (z.shape[dim] - 1)).sqrt().mean().item()


def streams_of(model, images):
    """(width, dim, z_0, z_{l-1}, z_l) of each block, from the blocks as functions of the whole stream."""
    inputs, found = {}, []
    hooks = [
        sequence.register_forward_pre_hook(lambda module, arguments: inputs.update({module: arguments[0]}))
        for sequence in step_sequences(model)
    ]
    with torch.no_grad():
        model(images)
        for hook in hooks:
            hook.remove()
        for sequence in step_sequences(model):
            start = z = inputs[sequence]
            for block in sequence:
                before, z = z, block(z)
                found.append((block.width, sequence.dim, start, before, z))
    return found


def test_a_stream_that_begins_behind_a_block_has_its_scale():
    torch.manual_seed(0)
    plain = timm.create_model("resnet18", layers=(1, 6, 1, 1), num_classes=5)
    model = stepify(plain, 2, stream_scale=4.0).eval()
    measured, stage = measure_stream(model, loss)[len(model.layer1) + 1 :], model.layer2
    assert stage.lead == 1 and len(stage.widths) == 2
    with torch.no_grad():
        first = z = 4.0 * stage.blocks[0](model.layer1(model.maxpool(model.act1(model.bn1(model.conv1(IMAGES))))))
        for number, block in enumerate(stage.blocks[1:]):
            width = stage.widths[number >= stage.depths[0]]
            z = torch.cat((block(z[:, :width]), z[:, width:]), 1)
            sigmas = [one.std(1).mean().item() for one in (first, z, first[:, :width], z[:, :width])]
            found = measured[number].gamma, measured[number].gamma_read
            assert found == pytest.approx((sigmas[0] / sigmas[1], sigmas[2] / sigmas[3]), rel=1e-3)


@pytest.mark.parametrize(
    ("make", "side", "num_blocks"),
    [
        (deit, 32, 3),
        (steps_deit, 32, 5),
        (Own, 32, 5),
        (lambda: steps_deit(widths=(48, 34, 24), depths=(1, 2, 2), num_heads=(3, 2, 2)), 32, 5),
        (lambda: timm.create_model("test_steps_swin").eval(), 224, 8),
        (lambda: timm.create_model("test_steps_swin_baseline").eval(), 224, 5),
    ],
    ids=["DeiT", "Steps-DeiT", "own", "reverse", "Steps-Swin", "Swin"],
)
def test_each_quantity_written_out(make, side, num_blocks, request):
    is_reverse = "reverse" in request.node.name  # its output is in another order, in which the parts are elsewhere
    model = make()
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    blocks = measure_stream(model, lambda model: model(images).square().mean())
    assert len(blocks) == num_blocks and all(parameter.grad is None for parameter in model.parameters())
    for block, (width, dim, start, before, after) in zip(blocks, streams_of(model, images), strict=True):
        whole = start.shape[dim]
        assert block.width == width
        assert block.gamma == pytest.approx(sigma(start, dim) / sigma(after, dim), rel=1e-4)
        assert (block.gamma_read == block.gamma) == (width == whole)
        if is_reverse:
            continue
        part = [z.narrow(dim, 0, width) for z in (start, before, after)]
        assert block.gamma_read == pytest.approx(sigma(part[0], dim) / sigma(part[2], dim), rel=1e-4)
        assert block.branch == pytest.approx(((part[2] - part[1]).norm() / part[1].norm()).item(), rel=1e-4)
        tokens = zip(*(z.movedim(dim, -1).reshape(-1, whole) for z in (start, after)))
        expected = torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in tokens]).mean()
        assert block.correlation == pytest.approx(expected.item(), abs=1e-4)


class _Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + 3 * self.linear(self.norm(x))


@pytest.mark.parametrize("loop", ["all", "slice"])
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_blocks_that_a_model_loops_over_are_measured_as_those_that_it_calls(loop, scale):
    """With γ written out for the loop, whose first block alone sees where the stream begins."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.Sequential(*(_Block(64) for _ in range(6))))
    x = torch.randn(8, 7, 10)
    model = stepify(model, 3, example=x, stream_scale=scale)
    blocks = model[1]
    expected = measure_stream(model, lambda model: model(x).square().mean())

    def looped(model):
        z = model[0](x)
        for block in blocks if loop == "all" else blocks[: len(blocks) - 1]:
            z = block(z)
        return z.square().mean()

    got = measure_stream(model, looped)
    with torch.no_grad():
        z = model[0](x)
        sigma, by_hand = scale * z.std(-1).mean(), []
        for block in blocks:
            z = block(z)
            by_hand.append((sigma / z.std(-1).mean()).item())
    assert len(got) == len(blocks) > 6
    if loop == "slice":  # the last one has not run
        assert math.isnan(got[-1].gamma) and got.pop().width == expected.pop().width == 64
    for ours, theirs, gamma in zip(got, expected, by_hand):
        assert ours.gamma == pytest.approx(gamma, rel=1e-5) and ours.width == theirs.width
        assert [ours.gamma, ours.gamma_read, ours.correlation] == pytest.approx(
            [theirs.gamma, theirs.gamma_read, theirs.correlation], rel=1e-5
        )
    assert not blocks._stream_hooks and not blocks._forward_pre_hooks


def test_gradients_are_those_of_what_each_block_writes():
    model = steps_deit()
    blocks = measure_stream(model, loss)
    x = model._pos_embed(model.patch_embed(IMAGES))
    y, outputs, start = None, [], 0
    for network, width in zip(model.blocks.networks, model.blocks.widths):
        y = x[..., :width] if y is None else torch.cat((y, x[..., start:width]), -1)
        for block in network:
            y = block(y)
            y.retain_grad()
            outputs.append(y)
        start = width
    model.forward_head(model.norm(y)).square().mean().backward()
    assert [b.gradient for b in blocks] == pytest.approx([o.grad.norm().item() for o in outputs], rel=1e-3)


@pytest.mark.parametrize(("name", "num_blocks"), [("test_vit", 6), ("resnet18", 8), ("test_steps_resnet", None)])
def test_any_residual_model(name, num_blocks):
    model = timm.create_model(name).eval()
    images = torch.randn(1, 3, 160, 160) if name == "test_vit" else torch.randn(1, 3, 64, 64)
    blocks = measure_stream(model, lambda model: model(images).sum())
    assert num_blocks is None or len(blocks) == num_blocks
    for block in blocks:
        assert block.gamma > 0 and block.gradient > 0 and -1 <= block.correlation <= 1 + 1e-5


@pytest.mark.parametrize(
    ("name", "side", "dim"), [("mambaout_femto", 64, -1), ("tiny_vit_5m_224", 224, -1), ("convnext_atto", 64, 1)]
)
def test_channels_of_blocks_with_convolutions_are_first_or_last(name, side, dim):
    model, images = timm.create_model(name).eval(), torch.randn(1, 3, side, side)
    seen = []
    blocks_of(model)[-1].register_forward_hook(lambda block, inputs, output: seen.append((inputs[0], output)))
    found = measure_stream(model, lambda model: model(images).sum())[-1]
    ((z, after),) = seen
    assert found.width == after.shape[dim] == model.num_features
    assert found.branch == pytest.approx(((after - z).norm() / z.norm()).item(), rel=1e-4)


def test_a_language_model():
    heads = {"num_attention_heads": (2, 2), "embedding_scale": 50.0}
    model = create(widths=(16, 24), depths=(2, 1), vocab_size=30, **heads).eval()
    ids = torch.arange(8)[None]
    blocks = measure_stream(model, lambda model: model(ids, labels=ids).loss)
    states = model(ids, output_hidden_states=True).hidden_states  # the last one is behind the norm
    assert [block.width for block in blocks] == [16, 16, 24]
    for block, z in zip(blocks[:-1], states[1:-1], strict=True):
        assert block.gamma == pytest.approx(sigma(states[0], -1) / sigma(z, -1), rel=1e-4)
        read = sigma(states[0][..., : block.width], -1) / sigma(z[..., : block.width], -1)
        assert block.gamma_read == pytest.approx(read, rel=1e-4) and block.gradient > 0
    assert blocks[-1].gamma == blocks[-1].gamma_read


def test_a_detector():
    """Its losses come from heads of several levels; the blocks are those of its backbone, in one pass."""
    torch.manual_seed(0)
    small = {"num_classes": 3, "size": 64, "max_size": 96, "channels": 16, "hidden": 24, "samples": 32}
    args = {"backbone": "test_steps_swin", "anchors": (8, 16, 32, 64, 128), **small}
    model = build_model(ModelSpec("mask_rcnn", args)).train()
    images, masks = [torch.rand(3, 64, 80)], torch.zeros(1, 64, 80, dtype=torch.uint8)
    masks[:, 6:32, 4:40] = 1
    targets = [{"boxes": torch.tensor([[4.0, 6.0, 40.0, 32.0]]), "labels": torch.tensor([1]), "masks": masks}]
    blocks = measure_stream(model, lambda model: sum(model(images, targets).values()))
    assert [block.width for block in blocks] == [16, 32, 32, 32, 48, 64, 64, 64]
    assert all(block.gamma > 0 and block.gradient > 0 for block in blocks)


def test_weights_that_need_no_gradient():
    model = steps_deit()
    expected = measure_stream(model, loss)
    blocks = measure_stream(model.requires_grad_(False), loss)
    assert [block.gamma for block in blocks] == [block.gamma for block in expected]
    assert all(math.isnan(block.gradient) for block in blocks)
    line = json.loads(json.dumps({"epoch": 1, "step": 2, **as_line(blocks, "epoch_end")}))
    assert line["per_block"]["gradient"] == [None] * 5 and line["val_gradient_first_over_last"] is None


def test_compiled_blocks_are_measured_eagerly():
    model, compiled = steps_deit(), steps_deit()
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    compile_blocks(compiled, backend=backend)
    expected, blocks = measure_stream(model, loss), measure_stream(compiled, loss)
    assert not calls and as_line(blocks, "epoch_end") == as_line(expected, "epoch_end")
    loss(compiled)
    assert calls  # outside it runs as compiled
    assert as_line(measure_stream(compiled, loss), "epoch_end") == as_line(expected, "epoch_end")


@pytest.fixture(scope="module")
def frozen_heap():
    """What other tests have left is searched once, and not by every collection in this file."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("design", [None, *DESIGNS])
def test_nothing_of_a_pass_is_kept_once_it_was_measured(design):
    """In a training that measures every hundredth update, each such graph would stay until its end."""

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor

    saved = weakref.WeakSet()

    def pack(tensor):
        saved.add(one := Saved(tensor))
        return one

    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(16, num_heads=2) for _ in range(3)))
    model = nn.Sequential(nn.Linear(4, 16), blocks if design is None else connect(blocks, design), nn.LayerNorm(16))
    x = torch.randn(2, 5, 4)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
        value = model(x).square().mean()
        assert saved  # the hooks see what a pass keeps
        value.backward()
        del value
        measure_stream(model, lambda model: model(x).square().mean())
    gc.collect()
    assert not len(saved)


@pytest.mark.parametrize("design", ["attention_residuals", "deep_cross_attention", "mudd", "dense_former"])
def test_what_a_bfloat16_stream_keeps_grows_with_the_depth_alone(design):
    """Designs that read all blocks before compute in float32, and a copy a reader would grow with its square."""

    def kept(depth):
        torch.manual_seed(0)
        blocks = connect(nn.Sequential(*(Block(16, num_heads=2) for _ in range(depth))), design).bfloat16()
        copies = set()

        def pack(tensor):
            if tensor.dtype == torch.float32 and tensor.numel() == 2 * 5 * 16:
                copies.add(tensor.untyped_storage().data_ptr())
                alive.append(tensor)
            return tensor

        alive = []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = blocks(torch.randn(2, 5, 16).bfloat16())
        y.float().square().mean().backward()
        assert all(one.grad is not None for one in blocks.parameters())
        return len(copies)

    assert kept(16) <= 2 * kept(8) + 8


def test_what_has_no_stream_or_no_loss_is_refused():
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=12)
    with pytest.raises(
        UserError, match=r"loss: got shape \(2, 1000\), expected a function of the model that returns one"
    ):
        measure_stream(vit, lambda model: model(torch.randn(2, 3, 32, 32)))
    with pytest.raises(UserError, match="loss: got Tensor, expected a function of the model"):
        measure_stream(vit, torch.randn(2, 3, 32, 32))
    with pytest.raises(UserError, match="Linear has no sequence of residual blocks"):
        measure_stream(nn.Linear(3, 3), lambda model: model(torch.ones(3)).sum())


class _Series(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm1d(width), nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x):
        return x + torch.relu(self.conv(self.norm(x)))


class _Video(nn.Module):
    """With biases in no layer, as torchvision's."""

    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv3d(width, width, 3, padding=1, bias=False), nn.BatchNorm3d(width)

    def forward(self, x):
        return x + self.norm(self.conv(x))


class _Conformer(nn.Module):
    """(B, N, C), with a convolution over the tokens inside."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(width), nn.Conv1d(width, width, 3, padding=1, groups=width)

    def forward(self, x):
        return x + self.conv(self.norm(x).mT).mT


@pytest.mark.parametrize(
    ("block", "shape", "dim"),
    [
        (_Series, (2, 16, 50), 1),
        (_Series, (2, 16, 16), 1),  # as long as it has channels
        (_Video, (2, 16, 4, 5, 6), 1),
        (_Conformer, (2, 50, 16), -1),
        (_Conformer, (2, 16, 16), -1),
        (_Block, (2, 16, 16), -1),
        (_Block, (2, 3, 4, 5, 16), -1),
    ],
)
def test_channels_of_series_and_videos(block, shape, dim):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(block(16) for _ in range(3))), torch.randn(shape)
    found, z = measure_stream(model, lambda model: model(x).square().mean()), x
    for one, layer in zip(found, model, strict=True):
        z = layer(z)
        assert one.width == 16 and one.gamma == pytest.approx(sigma(x, dim) / sigma(z, dim), rel=1e-4)


class _Loop(nn.Module):
    """Token ids -> blocks in a loop of the test's own -> two heads."""

    def __init__(self, loop, blocks, heads=nn.Linear):
        super().__init__()
        self.embeddings = nn.ModuleList(_Table() for _ in range(2))
        self.blocks = nn.ModuleList(blocks)
        self.heads = nn.ModuleList(heads(16, 4) for _ in range(2))
        self.loop = loop

    def forward(self, ids):
        z = self.loop(self.blocks, sum(table(ids) for table in self.embeddings))
        return torch.stack([head(z).square().mean() for head in self.heads]).mean()


class _Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 16)

    def forward(self, ids):
        return self.table(ids)


class _Head(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return self.linear(self.norm(x))


IDS = torch.arange(9)[None]


def in_a_row(blocks, z, seen=None):
    for block in blocks:
        z = block(z)
        if seen is not None:
            seen.append(z)
    return z


@pytest.mark.parametrize("heads", [nn.Linear, _Head])
def test_embeddings_and_heads_are_no_blocks(heads):
    """Also heads that keep the width, which all get one tensor."""
    model = _Loop(in_a_row, [_Block(16) for _ in range(3)], heads)
    found, seen = measure_stream(model, lambda model: model(IDS)), []
    z = sum(table(IDS) for table in model.embeddings)
    in_a_row(model.blocks, z, seen)
    assert [one.gamma for one in found] == pytest.approx([sigma(z, -1) / sigma(one, -1) for one in seen], rel=1e-4)


class _Branch(_Block):
    def forward(self, x):
        return self.linear(self.norm(x))


def summed_outside(blocks, z):
    for block in blocks:
        z = z + block(z)
    return z


def summed_in_place(blocks, z):
    for block in blocks:
        z += block(z)
    return z


def two_in_turn(blocks, z):
    """A container beside it has every other block, as for attention and MLPs."""
    for attend, mix in zip(blocks, OTHERS):
        z = z + attend(z)
        z = z + mix(z)
    return z


OTHERS = nn.ModuleList(_Branch(16) for _ in range(3))


@pytest.mark.parametrize(
    ("loop", "grad"), [(summed_outside, True), (summed_outside, False), (summed_in_place, False), (two_in_turn, True)]
)
def test_a_model_that_adds_outside_of_its_blocks_is_refused(loop, grad):
    """What its blocks return is F(x), and not the stream; norms beside a block are no sum."""
    model = _Loop(loop, [_Branch(16) for _ in range(3)])
    model.others = OTHERS
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(UserError, match=r"analyze: _Loop adds what goes into blocks.0 \(_Branch\) to what comes out of"),
    ):
        measure_stream(model.requires_grad_(grad), lambda model: model(IDS))
    normed = _Loop(lambda blocks, z: in_a_row(blocks, z).tanh(), [_Block(16) for _ in range(3)])
    assert len(measure_stream(normed, lambda model: model(IDS))) == 3


def test_blocks_that_do_not_run_are_no_numbers():
    """As LayerDrop leaves some out; of a loss that calls the model twice, the first call counts."""
    calls = []

    def without_second(blocks, z):
        calls.append(len(calls))
        return in_a_row([block for i, block in enumerate(blocks) if i != 1 or len(calls) > 1], z)

    model = _Loop(without_second, [_Block(16) for _ in range(4)])
    found = measure_stream(model, lambda model: model(IDS) + model(IDS))
    assert len(calls) == 2 and [math.isnan(one.gamma) for one in found] == [False, True, False, False]
    assert math.isnan(found[1].gradient) and all(one.width == 16 for one in found)
    seen, z = [], sum(table(IDS) for table in model.embeddings)
    in_a_row([model.blocks[i] for i in (0, 2, 3)], z, seen)
    by_hand = [sigma(z, -1) / sigma(one, -1) for one in seen]
    assert [one.gamma for one in found if one.gamma > 0] == pytest.approx(by_hand, rel=1e-4)
    line = as_line(found, "update")
    assert line["train_mean_gamma"] == pytest.approx(sum(by_hand) / 3, rel=1e-3)
    assert line["per_block"]["gamma"][1] is None and line["train_gradient_first_over_last"] > 0


class _Returns(_Block):
    def __init__(self, width, kind):
        super().__init__(width)
        self.kind = kind

    def forward(self, x, mask=None):
        return self.kind(super().forward(x))


def by_keyword(blocks, z):
    for block in blocks:
        z = block(mask=torch.ones(9), x=z)[0]
    return z


def test_blocks_that_are_called_by_keyword_or_return_a_list():
    torch.manual_seed(0)
    model = _Loop(by_keyword, [_Returns(16, lambda y: [y, None]) for _ in range(3)])
    found, z = measure_stream(model, lambda model: model(IDS)), sum(table(IDS) for table in model.embeddings)
    start = sigma(z, -1)
    for one, block in zip(found, model.blocks, strict=True):
        z = block(z)[0]
        assert one.gamma == pytest.approx(start / sigma(z, -1), rel=1e-4) and one.gradient > 0


@pytest.mark.parametrize(
    ("loop", "make", "said"),
    [
        (
            by_keyword,
            lambda: _Returns(16, lambda y: {0: y}),
            r"blocks.0 \(_Returns\) returns a dict, expected blocks that take",
        ),
        (
            lambda blocks, z: [z := z + part(z) for pair in blocks for part in pair][-1],
            lambda: nn.ModuleList([_Branch(16), _Head(16, 4)]),
            r"_Loop has called none of its 3 blocks, the first of which is blocks.0 \(ModuleList\)",
        ),
    ],
    ids=["dict", "lists"],
)
def test_what_is_no_block_is_refused_in_a_line(loop, make, said):
    model = _Loop(loop, [make() for _ in range(3)])
    model.embeddings, model.heads = nn.ModuleList([_Table()]), nn.ModuleList([_Head(16, 4)])
    with pytest.raises(UserError, match=said):
        measure_stream(model, lambda model: model(IDS))


def test_running_statistics_are_kept():
    model, x = nn.Sequential(*(_Series(8) for _ in range(2))).train(), torch.randn(3, 8, 10)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert measure_stream(model, lambda model: model(x).square().mean())[0].gamma > 0 and model.training
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def trained(folder, *changes):
    short = ["epochs=1", "train_samples=96", "accumulation_steps=2", "ema_decay=0.5", "device=cpu"]
    recipe = override(find_recipe("digits/tiny"), [*short, *changes])
    with Lines() as display:
        train_run(recipe, folder, display)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return recipe, [line for line in lines if line["kind"] == "stream"]


def test_measuring_in_training_and_at_epochs_ends_does_not_change_the_run(tmp_path):
    recipe, lines = trained(tmp_path / "measured", "stream_interval=2", "stream_epochs=1")
    when = [(line["at"], line["epoch"], line["step"]) for line in lines]
    assert when == [("epoch_end", 0, 0), ("update", 1, 1), ("update", 1, 2), ("epoch_end", 1, 3)]
    torch.manual_seed(recipe.seed)
    model, task = build_task(recipe)
    batches = {
        "update": next(iter(task.batches(0, 0, BatchShard(0, 1, 2), torch.device("cpu")))),  # the first of two parts
        "epoch_end": task.example_batch(torch.device("cpu")),
    }
    for line, training in ((lines[0], False), (lines[1], True)):
        batch = batches[line["at"]]
        blocks = measure_stream(model.train(training), lambda model, batch=batch: task.loss(model, batch)[0])
        expected = as_line(blocks, line["at"])["per_block"]
        for name, values in expected.items():
            assert line["per_block"][name] == pytest.approx(values, rel=1e-3), name
    assert lines[1]["train_last_gamma"] == lines[1]["per_block"]["gamma"][-1] == statistics_of(lines[1])[-1].gamma
    trained(tmp_path / "alone", "stream_epochs=0")
    ours, theirs = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("measured", "alone"))
    assert ours == theirs


def test_updates_of_a_compiled_model_are_measured_too(tmp_path):
    """The second of three updates is compiled."""
    (_, eager), (_, compiled) = (
        trained(tmp_path / name, "stream_interval=3", "stream_epochs=0", f"compile={name}")
        for name in ("false", "true")
    )
    assert [line["step"] for line in compiled] == [1, 3]
    for ours, expected in zip(compiled, eager):
        for name, values in expected["per_block"].items():
            assert ours["per_block"][name] == pytest.approx(values, rel=1e-3), name


@pytest.mark.parametrize("at", ["epoch_end", "update"])
def test_a_line_is_read_as_it_was_written(at):
    blocks = measure_stream(timm.create_model("resnet18").eval(), lambda model: model(IMAGES).sum())
    line = {"epoch": 3, "step": 7, **as_line(blocks, at)}
    assert None in line["per_block"]["branch"]  # blocks that change the shape have no stream to compare
    read = read_line(json.loads(json.dumps(line)))
    assert (read.at, read.epoch, read.step) == (at, 3, 7)
    again, first = as_line(read.blocks, at), as_line(blocks, at)
    assert again.keys() == first.keys() and again["per_block"] == first["per_block"]
    for name, value in first.items():
        if isinstance(value, float):  # made of numbers that the line rounds
            assert again[name] == pytest.approx(value, rel=1e-3), name
    split = {"epoch_end": "val_", "update": "train_"}[at]  # so that a tracker keeps the two apart
    assert all(name.startswith(split) for name, value in as_line(blocks, at).items() if isinstance(value, float))
    assert read_line({"kind": "epoch", "epoch": 1}) is None


class _OwnLoop(nn.Module):
    def __init__(self, num_classes=10, in_chans=1, **kwargs):
        super().__init__()
        self.num_classes = num_classes
        self.stem, self.head = nn.Linear(in_chans * 64, 16), nn.Linear(16, num_classes)
        self.blocks = nn.ModuleList(_Branch(16) for _ in range(2))
        self.pretrained_cfg = {"input_size": (1, 8, 8)}

    def forward(self, x):
        return self.head(summed_outside(self.blocks, self.stem(x.flatten(1))))


class _NoBlocks(_OwnLoop):
    def __init__(self):
        super().__init__()
        del self.blocks

    def forward(self, x):
        return self.head(self.stem(x.flatten(1)))


@pytest.mark.parametrize(
    "make, why",
    [
        (_OwnLoop, "_OwnLoop adds what goes into blocks.0 (_Branch)"),
        (_NoBlocks, "_NoBlocks has no sequence of residual blocks"),
    ],
)
@pytest.mark.parametrize("when", ["stream_epochs=1", "stream_interval=1"])
def test_a_model_without_a_stream_trains_and_it_is_said_once(tmp_path, monkeypatch, capsys, when, make, why):
    monkeypatch.setattr("stepsnet.tasks.classification.task.build_model", lambda spec, **kwargs: make())
    _, lines = trained(tmp_path / "run", "stream_epochs=0", "stream_interval=0", when)
    said = capsys.readouterr()
    assert not lines and (said.out + said.err).count(f"analyze: {why}") == 1


class _TwoScales(nn.Module):
    """As CrossViT: blocks of two streams beside each other, and projections between them that change the width."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width) for width in (8, 16))
        self.projections = nn.ModuleList(nn.Sequential(nn.Linear(*widths)) for widths in ((8, 16), (16, 8)))

    def forward(self, x):
        ours, theirs = self.blocks[0](x), self.blocks[1](torch.cat((x, x), -1))
        return self.projections[0](ours.mean(0)).sum() + self.projections[1](theirs.mean(0)).sum()


def test_streams_beside_each_other_are_not_left_out_for_layers_that_change_the_width():
    torch.manual_seed(0)
    model, x = _TwoScales(), torch.randn(5, 8)
    found = measure_stream(model, lambda model: model(x))
    with torch.no_grad():
        by_hand = [sigma(z, -1) / sigma(block(z), -1) for z, block in zip((x, torch.cat((x, x), -1)), model.blocks)]
    assert [one.gamma for one in found[:2]] == pytest.approx(by_hand, rel=1e-4)


class _TwoContainers(nn.Module):
    """An encoder and a decoder of one shape; the decoder's input is the encoder's output only where it is asked."""

    def __init__(self, apart):
        super().__init__()
        self.apart = apart
        self.encoder, self.decoder = (nn.Sequential(*(_Block(16) for _ in range(2))) for _ in range(2))

    def forward(self, x):
        state = self.encoder(x)
        return self.decoder(state.flip(1) - 1 if self.apart else state).sum()


@pytest.mark.parametrize("apart", [True, False])
def test_a_stream_goes_on_into_another_container_where_it_is_handed_on(apart):
    model, x = _TwoContainers(apart), torch.randn(2, 5, 16)
    found = measure_stream(model, lambda model: model(x))
    with torch.no_grad():
        state = model.encoder(x)
        begins = state.flip(1) - 1 if apart else x
        by_hand = sigma(begins, -1) / sigma(model.decoder(state.flip(1) - 1 if apart else state), -1)
    assert found[-1].gamma == pytest.approx(by_hand, rel=1e-4)
    if apart:  # as in the same model as a StepsNet of one step
        stepped = measure_stream(stepify(model, 1, example=x), lambda model: model(x))
        assert [one.gamma for one in stepped] == pytest.approx([one.gamma for one in found], rel=1e-4)


class _InPlace(_Block):
    def forward(self, x):
        x += self.linear(self.norm(x.relu()))
        return x


class _WithHeads(nn.Module):
    """Heads beside the blocks, each of which writes into a map of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(_Block(16) for _ in range(3)))
        self.heads = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 4)) for _ in range(2))

    def forward(self, x):
        x = self.blocks(x)
        return sum(head(x + place).sum() for place, head in enumerate(self.heads))


def test_heads_that_write_into_their_input_are_no_blocks():
    model, x = _WithHeads(), torch.randn(2, 5, 16)
    assert len(measure_stream(model, lambda model: model(x))) == 3


def test_blocks_that_write_into_their_input_are_refused():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Sequential(*(_InPlace(16) for _ in range(3)))), torch.randn(2, 16)
    with pytest.raises(UserError, match=r"analyze: 1\.0 \(_InPlace\) changes its input in place, expected blocks"):
        measure_stream(model, lambda model: model(x).sum())


def test_a_part_of_joined_steps_without_the_first_block_of_a_stream_is_refused():
    stepped = stepify(timm.create_model("test_vit"), 2)
    stepped.blocks = connect(stepped.blocks, "value_residual")
    blocks, first = stepped.blocks, stepped.blocks.depths[0]
    x = torch.randn(1, 5, blocks.width)
    assert first > 1
    for part in (blocks[1:], blocks[: first + 2][first + 1 :]):
        for run in (part, lambda x, part=part: [block(x) for block in part]):
            with pytest.raises(UserError, match="a part of a connected sequence without its first block"):
                run(x)
    torch.testing.assert_close(blocks[first:](blocks[:first](x)), blocks(x))


def test_a_joined_sequence_that_is_looped_over_begins_its_stream_by_the_hook():
    blocks = connect([Block(16, 2) for _ in range(2)], "layer_scale")
    x = torch.randn(1, 3, 16)
    with blocks.stream_hook(lambda module, z: 2 * z):
        looped = x
        for block in blocks:
            looped = block(looped)
        torch.testing.assert_close(looped, blocks(x))


@pytest.mark.usefixtures("frozen_heap")
def test_a_pass_without_a_backward_pass_leaves_nothing_behind():
    """timm's checkpoints hold the blocks of a loop, which hold nothing of it where the state is the stream."""
    model = timm.create_model("test_vit", img_size=32)
    model.blocks = connect(model.blocks, "layer_scale")
    model.set_grad_checkpointing()
    alive = []
    for _ in range(3):
        loss(model.train())
        gc.collect()
        alive.append(sum(type(one) is torch.Tensor for one in gc.get_objects()))
    assert alive[2] <= alive[0]
