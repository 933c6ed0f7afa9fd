"""The memory that training takes: formulas written out, and the peak that torch's profiler sees on the CPU."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import timm
import torch

import stepsnet
from stepsnet.analysis.memory import activation_bytes, plan_memory, states_memory
from stepsnet.analysis.speed import measured_peak
from stepsnet.cli import main
from stepsnet.errors import UserError

ROOT = Path(__file__).parent.parent
SIZE = (3, 64, 64)


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as if it were run
    spec.loader.exec_module(module)
    return module


def tiny(**kwargs):
    with torch.device("meta"):
        return timm.create_model("steps_deit_tiny_patch16_224", img_size=64, **kwargs)


def training_memory(model, micro_batch, **options):
    return states_memory(model, activations=activation_bytes(model, SIZE, micro_batch), **options)


def test_weights_gradients_and_optimizer_written_out():
    c, depth, classes, patches = 192, 12, 1000, 16  # of one step: DeiT-T itself
    outside = 3 * 16 * 16 * c + c + c + (patches + 1) * c + 2 * c + c * classes + classes
    params = outside + depth * (12 * c * c + 13 * c)
    memory = training_memory(tiny(widths=(c,), depths=(depth,)), 1, average=True)
    assert memory.weights == memory.gradients == memory.averages == 4 * params
    assert memory.optimizer == 8 * params and memory.gathered == 0
    assert memory.total == 5 * 4 * params + memory.activations == memory.as_dict()["total"]
    momentum = training_memory(tiny(widths=(c,), depths=(depth,)), 1, optimizer_states=1)
    assert momentum.optimizer == 4 * params and momentum.averages == 0


def test_fsdp_divides_everything_but_activations_and_what_it_gathers():
    model = tiny(widths=(96, 192), depths=(2, 3))
    ddp, fsdp = training_memory(model, 2), training_memory(model, 2, shards=8)
    for term in ("weights", "gradients", "optimizer"):
        assert getattr(fsdp, term) == pytest.approx(getattr(ddp, term) / 8, rel=1e-5)
    assert fsdp.activations == ddp.activations
    blocks = [12 * c * c + 13 * c for c in (96, 192)]
    outside = ddp.weights // 4 - 2 * blocks[0] - 3 * blocks[1]
    assert fsdp.gathered == 4 * (outside + 2 * blocks[1])


@pytest.mark.parametrize("name", ["test_steps_deit", "test_steps_resnet", "test_steps_swin", "test_vit"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_activations_agree_with_the_profiler(name, share):
    from functools import partial

    from torch.utils.checkpoint import checkpoint

    from stepsnet.models.blocks import blocks_of

    torch.manual_seed(0)
    model = timm.create_model(name).train()
    size = model.pretrained_cfg["input_size"]
    predicted = activation_bytes(model, size, 4, grad_checkpointing=share)
    blocks = blocks_of(model)
    for block in blocks[: round(share * len(blocks))]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    images = torch.zeros(4, *size)
    measured = measured_peak(lambda: model(images).sum().backward(), torch.device("cpu"))
    assert predicted == pytest.approx(measured, rel=0.1)


def test_the_whole_of_training_agrees_with_the_profiler():
    row = load(ROOT / "benchmarks" / "memory.py").measure("test_vit", 2, input_size=(3, 160, 160))
    assert row["predicted"]["total"] == pytest.approx(row["measured"]["accumulated"], rel=0.1)
    assert row["measured"]["one_micro_batch"] <= 1.01 * row["predicted"]["total"]


def test_what_makes_activations_smaller():
    model = tiny(widths=(96, 192), depths=(4, 4))
    whole, half, none = (activation_bytes(model, SIZE, 8, share) for share in (0.0, 0.5, 1.0))
    assert whole > 1.2 * half > 1.2**2 * none
    # casts of the weights, two bytes each, are kept however small the batch; the rest shrinks
    weights = sum(parameter.numel() for parameter in model.parameters())
    lower = activation_bytes(model, SIZE, 64, amp_dtype="bfloat16")
    assert lower < 0.8 * activation_bytes(model, SIZE, 64) + 2 * weights
    assert activation_bytes(tiny(widths=(192,), depths=(8,)), SIZE, 8) > 1.2 * whole


def test_activations_are_linear_in_the_batch_and_the_model_is_left_alone():
    model = timm.create_model("test_steps_deit").eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    a, b, c = (activation_bytes(model, (3, 160, 160), batch) for batch in (8, 16, 32))
    assert c - b == pytest.approx(2 * (b - a), rel=1e-3) and b == pytest.approx(2 * a, rel=0.01)
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_compiled_model_whose_rates_are_plain_tensors():
    model = timm.create_model("test_vit", img_size=32, drop_path_rate=0.2)
    expected = activation_bytes(model, (3, 32, 32), 2)
    assert activation_bytes(stepsnet.optimize(model, "training"), (3, 32, 32), 2) == pytest.approx(expected, rel=0.1)


def test_the_command_for_machines_and_people(capsys):
    arguments = ["memory", "test_steps_deit", "--batch-size", "32", "--devices", "4"]
    arguments += ["--accumulation-steps", "2", "--shard"]
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["micro_batch"] == 4 and plan["model"] == "test_steps_deit"
    assert plan["fsdp"]["weights"] * 4 == pytest.approx(plan["ddp"]["weights"], rel=1e-3)
    assert plan == json.loads(
        json.dumps(plan_memory("test_steps_deit", 32, devices=4, accumulation_steps=2, shard=True))
    )
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "| | DDP | FSDP |" in out and f"| weights | {plan['ddp']['weights'] / 2**20:.1f} MiB |" in out
    assert "averages" not in out  # nothing of it is kept


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["test_steps_diet"], "model: got 'test_steps_diet', expected a timm or StepsNet model"),
        (["test_vit", "--devices", "0"], "devices: got 0, expected at least 1"),
        (["test_vit", "--batch-size", "0"], "batch_size: got 0, expected at least 1"),
        (
            ["test_vit", "--batch-size", "64", "--devices", "3", "--accumulation-steps", "2"],
            "batch_size: got 64, expected a multiple of 6",
        ),
        (["test_vit", "--amp-dtype", "int8"], "amp_dtype: got 'int8', expected one of float32"),
        (
            ["test_vit", "--grad-checkpointing", "2"],
            "grad_checkpointing: got 2.0, expected 0 to 1",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments, expected, capsys):
    assert main(["memory", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and err.startswith(f"stepsnet: {expected}")


def test_numbers_out_of_range_are_named():
    with pytest.raises(UserError, match="micro_batch: got 0, expected at least 1"):
        activation_bytes(tiny(), SIZE, 0)
