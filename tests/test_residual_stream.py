"""The signal in the residual stream, against the stream of each block written out."""

import json

import pytest
import timm
import torch
from stepsnet.analysis.shortcut_ratio import shortcut_ratios
from stepsnet.tasks.setup import set_up
from torch import nn

from stepsnet.analysis.block_statistics import as_line, statistics_of
from stepsnet.analysis.residual_stream import measure_stream
from stepsnet.console import Lines
from stepsnet.engine.task import BatchShard
from stepsnet.errors import UserError
from stepsnet.models.build import build_model
from stepsnet.models.steps_transformer import create
from stepsnet.overrides import override
from stepsnet.recipes import find_recipe
from stepsnet.run_folder import train_run

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def loss(model):
    return model(IMAGES).square().mean()


def steps_deit(**kwargs):
    torch.manual_seed(0)
    args = {"widths": (24, 34, 48), "depths": (2, 2, 1), "num_heads": (2, 2, 3), "img_size": 32, **kwargs}
    return timm.create_model("test_steps_deit", **args).eval()


def test_each_quantity_written_out():
    model = steps_deit()
    signals = measure_stream(model, loss)
    assert all(parameter.grad is None for parameter in model.parameters())
    inputs = []
    handle = model.blocks.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
    model(IMAGES)
    handle.remove()
    z0 = z = inputs[0].detach()
    for signal, block in zip(signals, model.blocks, strict=True):
        before, z = z, block(z).detach()
        width = block.width
        assert signal.width == width
        assert signal.gamma == pytest.approx((z0.std(-1).mean() / z.std(-1).mean()).item(), rel=1e-4)
        read = z0[..., :width].std(-1).mean() / z[..., :width].std(-1).mean()
        assert signal.gamma_read == pytest.approx(read.item(), rel=1e-4)
        change = (z - before)[..., :width].norm() / before[..., :width].norm()
        assert signal.branch == pytest.approx(change.item(), rel=1e-4)
        rows = zip(z.flatten(0, 1), z0.flatten(0, 1))
        expected = torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in rows]).mean()
        assert signal.correlation == pytest.approx(expected.item(), abs=1e-4)
    gammas = shortcut_ratios(model, IMAGES)["gamma"]
    assert [signal.gamma for signal in signals] == pytest.approx(gammas, rel=1e-5)


def test_gradients_are_those_of_what_each_block_writes():
    model = steps_deit()
    signals = measure_stream(model, loss)
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
    assert [s.gradient for s in signals] == pytest.approx([o.grad.norm().item() for o in outputs], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "blocks"), [("test_vit", None), ("test_steps_swin", None), ("resnet18", 8), ("test_steps_resnet", None)]
)
def test_any_residual_model(name, blocks):
    model = timm.create_model(name).eval()
    images = torch.randn(1, *model.default_cfg["input_size"])
    signals = measure_stream(model, lambda model: model(images).sum())
    assert blocks is None or len(signals) == blocks
    for signal in signals:
        assert signal.gamma > 0 and signal.gradient > 0 and -1 <= signal.correlation <= 1 + 1e-5


def test_a_reverse_network_and_a_language_model():
    model = steps_deit(reverse=True)
    gammas = shortcut_ratios(model, IMAGES)["gamma"]
    signals = measure_stream(model, loss)
    assert [s.gamma for s in signals] == pytest.approx(gammas, rel=1e-5) and signals[0].width == 48
    heads = {"num_attention_heads": (2, 2), "embedding_scale": 50.0}
    model = create(widths=(16, 24), depths=(2, 1), vocab_size=30, **heads).eval()
    ids = torch.arange(8)[None]
    signals = measure_stream(model, lambda model: model(ids, labels=ids).loss)
    states = model(ids, output_hidden_states=True).hidden_states
    for signal, z in zip(signals[:-1], states[1:-1]):
        assert signal.gamma == pytest.approx((states[0].std(-1).mean() / z.std(-1).mean()).item(), rel=1e-4)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(UserError, match="Linear has no sequence of residual blocks"):
        measure_stream(nn.Linear(3, 3), lambda model: model(torch.ones(3)).sum())


def trained(folder, *changes):
    short = ["epochs=1", "train_samples=96", "stream_epochs=0", "accumulation_steps=2", "device=cpu"]
    recipe = override(find_recipe("digits/tiny"), [*short, *changes])
    with Lines() as display:
        train_run(recipe, folder, display)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return recipe, [line for line in lines if line["kind"] == "measure_stream"]


def test_training_looks_on_every_so_many_updates_and_is_not_changed(tmp_path):
    recipe, lines = trained(tmp_path / "observe_stream", "stream_interval=2")
    assert [line["step"] for line in lines] == [1, 2] and all(line["epoch"] == 1 for line in lines)
    torch.manual_seed(recipe.seed)
    model, task = build_model(recipe.model), set_up(recipe).task
    batch = next(iter(task.batches(0, 0, BatchShard(0, 1, 2), torch.device("cpu"))))  # the first of two parts
    expected = as_line(measure_stream(model.train(), lambda model: task.loss(model, batch)[0]))
    for name, values in expected["per_block"].items():
        assert lines[0]["per_block"][name] == pytest.approx(values, rel=1e-3), name
    assert lines[0]["last_gamma"] == lines[0]["per_block"]["gamma"][-1] == statistics_of(lines[0])[-1].gamma
    trained(tmp_path / "alone")
    ours, theirs = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("observe_stream", "alone"))
    assert ours == theirs


def test_a_compiled_model_cannot_be_looked_at(tmp_path):
    with pytest.raises(UserError, match="stream_interval: got 2 with compile"):
        trained(tmp_path / "run", "stream_interval=2", "compile=true")


def test_what_is_not_a_number_survives_json():
    line = as_line(measure_stream(timm.create_model("resnet18").eval(), lambda model: model(IMAGES).sum()))
    assert None in line["per_block"]["branch"]  # blocks that change the shape have no stream to compare
    assert as_line(statistics_of(json.loads(json.dumps(line)))) == line
