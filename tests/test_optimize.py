"""What `optimize` does to a model: the same weights, and outputs that differ by rounding."""

import copy
import inspect
import types

import pytest
import timm
import torch
from timm.layers import DropPath
from torch import nn
from torch._dynamo.utils import counters

import stepsnet
from stepsnet.bench import bench, find_candidates
from stepsnet.errors import UserError
from stepsnet.models.compilation import FrozenForward, SharedDropPath
from stepsnet.models.optimize import PURPOSES, optimize
from stepsnet.models.windows import PermutedWindows, permute_windows, restore_windows
from stepsnet.runs import evaluate
from stepsnet.settings.config import ModelSpec
from stepsnet.tasks.prediction import PredictInputs

NAMES = ["test_steps_deit", "test_vit", "test_steps_swin", "test_steps_swinpp", "test_steps_resnet", "test_resnet"]


def made(name, **kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, **kwargs).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():  # biases, tables and statistics that are not zero
            if tensor.is_floating_point():
                tensor.add_(0.02 * torch.rand_like(tensor))
    return model


def images(model, batch=2):
    return torch.randn(batch, *model.pretrained_cfg["input_size"])


@torch.no_grad()
def differs(model, expected, x):
    return ((model(x) - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("purpose", PURPOSES)
def test_channels_are_last_in_images_alone(purpose):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.of_images = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 32, 3))
            self.of_volumes = nn.Conv3d(1, 2, 3)

        def forward(self, x):
            return self.of_volumes(self.of_images(x).unsqueeze(1)).sum((2, 3, 4))

    model, x = Both().eval(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = model(x)
        assert differs(stepsnet.optimize(model, purpose, compile=False), expected, x) < 1e-5
    kernel = model.of_images[2].weight
    assert kernel.is_contiguous(memory_format=torch.channels_last) and not kernel.is_contiguous()
    assert model.of_volumes.weight.is_contiguous()


def test_windows_can_be_left_to_heads_that_a_gpu_is_quick_with():
    model = made(
        "swin_tiny_patch4_window7_224", img_size=56, embed_dim=24, depths=(1, 1, 1, 1), num_heads=(3, 4, 12, 24)
    )
    permute_windows(model, 8)
    blocks = [stage.blocks[0] for stage in model.layers]
    assert [block.dim // block.attn.num_heads for block in blocks] == [8, 12, 8, 8]
    assert [isinstance(vars(block).get("_attn"), PermutedWindows) for block in blocks] == [True, False, True, True]
    x = torch.randn(1, 3, 56, 56)
    restored = copy.deepcopy(model)
    restore_windows(restored)
    with torch.no_grad():
        torch.testing.assert_close(model(x), restored(x), rtol=1e-4, atol=1e-4)


def test_windows_follow_weights_that_a_call_is_given():
    """Which may lie where those of the call before were."""
    model = stepsnet.optimize(made("test_steps_swin", img_size=64), compile=False)
    plain, x = made("test_steps_swin", img_size=64), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        for step in range(6):
            weights = {name: p * (1 + 0.2 * step) for name, p in plain.named_parameters()}
            expected = torch.func.functional_call(plain, weights, (x,))
            got = torch.func.functional_call(model, weights, (x,))
            del weights
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_windows_with_hooks_inside_attend_as_they_were_built():
    model, seen = made("test_steps_swin", img_size=64), []
    x = torch.randn(2, 3, 64, 64)
    attention = model.layers[0].blocks.networks[0][0].attn
    attention.fused_attn = False
    attention.register_forward_hook(lambda *_: seen.append("attention"))
    attention.attn_drop.register_forward_hook(lambda *_: seen.append("weights"))
    with torch.no_grad():
        expected = model(x)
        seen.clear()
        assert differs(stepsnet.optimize(model, compile=False), expected, x) < 1e-5
    assert seen == ["weights", "attention"] and attention.fused_attn
    restore_windows(model)
    assert not attention.fused_attn


@pytest.mark.parametrize("name", NAMES)
def test_weights_stay_and_outputs_differ_by_rounding(name):
    model = made(name)
    before, x = copy.deepcopy(model.state_dict()), images(model)
    with torch.no_grad():
        expected = model(x)
    assert stepsnet.optimize(model, compile=False) is model
    for _ in range(2):
        assert differs(model, expected, x) < 1e-5
        after = model.state_dict()
        assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
        assert not model.training
        stepsnet.optimize(model, compile=False)  # to do it twice is to do it once
    assert differs(copy.deepcopy(model), expected, x) < 1e-5


def test_windows_are_permuted_at_every_size_and_follow_their_weights():
    model = made("test_steps_swin", img_size=(96, 224), window_size=7)
    plain = copy.deepcopy(model)
    block = stepsnet.optimize(model, compile=False).layers[0].blocks[0]
    calls = []
    kernel = block._attn.block.attn._get_rel_pos_bias
    block.attn._get_rel_pos_bias = lambda: calls.append(1) or kernel()
    x = torch.randn(2, 3, 96, 224)  # 24 × 56 patches, which windows of 7 do not divide
    with torch.no_grad():
        assert differs(model, plain(x), x) < 1e-5
        for m in (model, plain):
            m.set_input_size((112, 224), window_size=7)
            for part in m.modules():
                if hasattr(part, "relative_position_bias_table"):
                    part.relative_position_bias_table.add_(torch.linspace(-1, 1, part.num_heads))
        x = torch.randn(2, 3, 112, 224)
        assert differs(model, plain(x), x) < 1e-5
        calls.clear()
        expected = plain(x)
        assert differs(model, expected, x) < 1e-5 and not calls  # the bias is made once
    loss, theirs = (m(x).square().sum() for m in (model, plain))
    torch.testing.assert_close(loss, theirs)
    loss.backward()
    assert block.attn.relative_position_bias_table.grad.abs().sum() > 0


# steps of two widths and, in Swin, a window that is shifted and one that is not
SHALLOW = {"test_steps_deit": {"depths": (1, 1, 0)}, "test_steps_swin": {"depths": ((2,), (0,), (1, 1, 0), (0, 0))}}


@pytest.mark.parametrize("name", ["test_steps_deit", "test_steps_swin", "test_steps_resnet"])
def test_a_frozen_model_gives_its_outputs_and_sees_new_weights(name):
    model = made(name, **SHALLOW.get(name, {}))
    x = images(model)
    with torch.no_grad():
        expected = model(x)
        counters.clear()
        stepsnet.optimize(model)
        assert isinstance(model.forward, FrozenForward)
        assert differs(model, expected, x) < 1e-5
        graphs = counters["stats"]["unique_graphs"]
        packed = counters["inductor"]["mkldnn_linear_weight_pack_matcher_count"]
        assert graphs == 1 and not counters["graph_break"]
        assert packed or name == "test_steps_resnet" or not torch.backends.mkldnn.is_available()
        again = copy.deepcopy(model)
        next(iter(model.parameters())).mul_(1.5)
        changed = model(x)
        assert torch.equal(changed, type(model).forward(model, x)) and not torch.equal(changed, expected)
        assert again.forward.model is again and counters["stats"]["unique_graphs"] == graphs
    assert model(x).requires_grad
    stepsnet.optimize(model, "training", compile=False)
    assert "forward" not in model.__dict__


def test_an_optimized_model_is_exported_and_traced_as_it_was_built():
    model = made("test_steps_deit", **SHALLOW["test_steps_deit"])
    x = images(model)
    signature = inspect.signature(model.forward)
    with torch.no_grad():
        expected = model(x)
        stepsnet.optimize(model)
        assert inspect.signature(model.forward) == signature == inspect.signature(copy.deepcopy(model).forward)
        for recorded in (torch.export.export(model, (x,)).module(), torch.jit.trace(model, x)):
            torch.testing.assert_close(recorded(x), expected)


def test_an_export_leaves_nothing_in_permuted_windows():
    model = made("test_steps_swin", **SHALLOW["test_steps_swin"])
    x = images(model)
    with torch.no_grad():
        expected = model(x)
        stepsnet.optimize(model, compile=False)
        torch.export.export(model, (x,))  # before any other call at this size
        found = model(x)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, expected)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.first(x).relu())


def test_a_forward_pass_on_the_model_itself_is_kept():
    """As a user or a library puts it there, whatever is done after it."""
    model, x = Small().eval(), torch.randn(2, 8)
    before = model.forward
    model.forward = lambda x: before(x).softmax(-1)
    own = model.forward
    with torch.inference_mode():
        expected = model(x)
        for _ in range(2):
            stepsnet.optimize(model)
            assert isinstance(model.forward, FrozenForward) and differs(model, expected, x) < 1e-5
        assert differs(copy.deepcopy(model), expected, x) < 1e-5
    assert torch.equal(model(x).detach(), model.forward.own(x).detach())  # with gradients
    stepsnet.optimize(model, compile=False)
    assert model.forward is own


def test_a_write_through_data_is_seen_once_it_is_optimized_again():
    model, x = Small().eval(), torch.randn(2, 8)
    swin = made("test_steps_swin")
    pictures = images(swin)
    stepsnet.optimize(swin, compile=False)
    stepsnet.optimize(model)
    with torch.inference_mode():
        model(x), swin(pictures)
        for name, parameter in [*model.named_parameters(), *swin.named_parameters()]:
            if "first" in name or "relative_position" in name:
                parameter.data.mul_(3)
        stepsnet.optimize(model)
        stepsnet.optimize(swin, compile=False)
        fresh = made("test_steps_swin")
        fresh.load_state_dict(swin.state_dict())
        assert differs(model, Small.forward(model, x), x) < 1e-5
        assert differs(swin, fresh(pictures), pictures) < 1e-5


def test_what_it_does_not_cover_stays_as_it_is():
    model = nn.Sequential(nn.Linear(4, 4))
    assert "forward" not in stepsnet.optimize(nn.Linear(3, 3), "training", compile=False).__dict__
    with pytest.raises(UserError, match="optimize: got for_='infer', expected inference or training"):
        stepsnet.optimize(model, "infer")
    with pytest.raises(UserError, match="optimize: got 'resnet18', expected a model"):
        stepsnet.optimize("resnet18")
    with pytest.raises(UserError, match="compile: no sequence of blocks was found"):
        stepsnet.optimize(model, "training")


def test_a_schedule_of_stochastic_depth_is_followed():
    model = optimize(made("test_vit", drop_path_rate=0.5), "training", compile=True).train()
    paths = [part for part in model.modules() if isinstance(part, DropPath)]
    assert paths and all(isinstance(path, SharedDropPath) for path in paths)
    x = torch.ones(8, 2, 2)
    for path in paths:
        path.drop_prob = 0.0
        assert torch.equal(path(x), x)
        path.drop_prob = 0.999
        assert not torch.equal(path(x), x)


def test_convolutions_train_with_channels_last_and_are_not_compiled():
    losses, x = [], torch.randn(2, 3, 96, 96)
    for for_training in (False, True):
        model = made("test_resnet").train()
        counters.clear()
        if for_training:
            stepsnet.optimize(model, "training")
            assert model.layer1[0].conv2.weight.is_contiguous(memory_format=torch.channels_last)
        loss = model(x).square().mean()
        loss.backward()
        losses.append(torch.cat([loss.detach().view(1), model.layer1[0].conv2.weight.grad.flatten()]))
        assert not counters["stats"]
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-5)


def test_windows_that_were_permuted_are_not_under_a_graph():
    model = made("test_steps_swin")
    stepsnet.optimize(model, compile=False)
    assert any("_attn" in module.__dict__ for module in model.modules())
    model.to("meta")  # where they are not permuted again
    stepsnet.optimize(model, compile=False)
    assert not any("_attn" in module.__dict__ for module in model.modules())


def test_bench_measures_what_is_optimized_for_each_purpose(monkeypatch):
    optimized, calls = stepsnet.optimize, []

    def spied(model, for_):
        calls.append((for_, optimized(model, for_)))
        return calls[-1][1]

    monkeypatch.setattr("stepsnet.bench.optimize", spied)
    with torch.compiler.set_stance("force_eager"):
        options = {"batch_size": 2, "rounds": 1, "memory_batches": None, "device": "cpu"}
        result = bench(find_candidates(["test_steps_swin"]), compile=True, **options)
    (inference, for_inference), (training, for_training) = calls
    assert (inference, training) == PURPOSES and for_inference is not for_training
    assert isinstance(for_inference.forward, FrozenForward) and "forward" not in for_training.__dict__
    assert for_training.training and not for_inference.training
    changed = zip(for_inference.parameters(), for_training.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in changed)  # the other has been trained
    assert result["compile"] and result["rows"][0]["training"]["n"] == 1


def test_predict_and_eval_optimize_without_compilation(monkeypatch, tmp_path):
    found = []
    monkeypatch.setattr("stepsnet.tasks.prediction.trained_model", lambda *args: made("test_steps_swin"))
    spec = types.SimpleNamespace(model=ModelSpec("test_steps_swin"), device="cpu")
    model, _ = PredictInputs(files=[]).model_of(tmp_path, spec)
    task = types.SimpleNamespace(evaluate=lambda model, *args: found.append(model), notices=list)
    evaluate._scores(task, made("test_resnet"), "cpu")
    assert isinstance(model.layers[0].blocks[0]._attn, PermutedWindows)
    assert found[0].layer1[0].conv2.weight.is_contiguous(memory_format=torch.channels_last)
    assert all("forward" not in one.__dict__ for one in (model, found[0]))
