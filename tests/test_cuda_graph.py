"""Models whose passes are replayed as CUDA graphs, without a GPU; test_on_device.py is about one."""

import copy
import dataclasses
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from line_fits import SETTINGS
from model_families import images, tiny
from residual_networks import stirred, vit
from torch import Tensor, nn

from stepsnet.engine.distributed import DistributedContext
from stepsnet.engine.prepare import prepare
from stepsnet.errors import UserError
from stepsnet.models import cuda_graph
from stepsnet.models.compilation import restore_forward, running_eagerly
from stepsnet.models.cuda_graph import GraphedInference, GraphedTraining, gradients_of, tensors_of
from stepsnet.residual import connect


@pytest.mark.parametrize(
    ("changes", "ranks", "device", "expected"),
    [
        ({}, 1, "cpu", "cuda_graph: got true on cpu, expected false, or a CUDA device"),
        ({"grad_checkpointing": 0.5}, 1, "cuda", "cuda_graph: got true with grad_checkpointing=0.5"),
        ({}, 2, "cuda", "cuda_graph: got true with 2 ranks, expected one"),
    ],
)
def test_what_cannot_be_captured_is_refused(changes, ranks, device, expected):
    settings = dataclasses.replace(SETTINGS, cuda_graph=True, **changes)
    with pytest.raises(UserError, match=expected):
        prepare(tiny("deit"), settings, DistributedContext(0, ranks, torch.device(device)))


def test_off_a_gpu_a_graphed_model_is_what_it_was():
    model, x = tiny("deit"), images()
    expected = model.train()(x)
    model.forward = GraphedTraining(model)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    with torch.no_grad():
        copied.patch_embed.proj.weight.zero_()
    assert copied.forward.model is copied and not torch.equal(copied(x), expected)
    assert torch.equal(model(x), expected) and not model.forward.captured
    with running_eagerly(model):
        assert model.forward.paused
    assert not model.forward.paused and isinstance(model.forward, GraphedTraining)
    restore_forward(model)
    assert "forward" not in model.__dict__


class Captures(GraphedTraining):
    """As on a GPU; what was captured is run again in place of a replay, with the weights that were there."""

    def _can_replay(self, given, inputs):
        return self.for_training or not self.model.training

    def _capture(self, run, inputs):
        held = copy.deepcopy(self.model.state_dict())
        self.captures = getattr(self, "captures", 0) + 1
        return lambda inputs: (run(inputs), held)[0]


def captures_of(model, *calls):
    for x in calls:
        model(x)
    return model.forward.captures


def test_each_kind_of_inputs_is_captured_once_and_again_where_the_model_has_changed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.BatchNorm1d(4), nn.Linear(4, 2)).train()
    model.forward = Captures(model)
    x = torch.randn(6, 4)
    assert captures_of(model, x, x, x + 1) == 1
    assert captures_of(model, x[:3], x[:3], x.double().float()) == 2
    with torch.no_grad():
        model[0].weight.mul_(2)
    model.load_state_dict(model.state_dict())
    assert captures_of(model, x) == 2  # graphs read the weights where they are
    model[1].eval()
    assert captures_of(model, x) == 3
    model[1].train()
    for changed, change in enumerate(
        (
            lambda: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
            lambda: setattr(model[0], "weight", nn.Parameter(torch.ones(4, 4))),
            lambda: model.__setitem__(1, nn.Dropout(0.0)),
            lambda: model[0].requires_grad_(False),
            lambda: setattr(model[2].running_mean, "data", torch.zeros(4)),
        ),
        start=4,
    ):
        change()
        assert captures_of(model, x, x) == changed
    model.eval()
    sizes = [torch.randn(size, 4) for size in range(1, 30)]
    assert captures_of(model, *sizes) == 8  # in evaluation a size may come once
    assert captures_of(model, *sizes[:3], *sizes[:3]) == 11  # two sizes may take turns
    assert captures_of(model, *[size for size in sizes for _ in range(2)]) == 15  # seven beside that of the training
    model.append(nn.Identity())
    assert captures_of(model, sizes[5], sizes[5]) == 16
    torch.testing.assert_close(model(sizes[0]), model.forward.as_built(sizes[0]))


def test_callers_in_several_threads_get_their_own_answers():
    class Shared(Captures):
        def _capture(self, run, inputs):
            place = inputs[0].clone()

            def replayed(inputs):
                place.copy_(inputs[0])
                time.sleep(0.001)  # in which another thread would write there
                return run([place])

            return replayed

    model = nn.Linear(1, 1).eval()
    model.forward = Shared(model)
    xs = [torch.full((1, 1), float(number)) for number in range(64)]
    with torch.no_grad(), ThreadPoolExecutor(8) as pool:
        found = list(pool.map(model, xs))
    for x, y in zip(xs, found, strict=True):
        torch.testing.assert_close(y, model.forward.as_built(x))


def test_tensors_in_other_places_are_another_kind():
    class Masked(nn.Linear):
        def forward(self, x, mask=None, bias=None):
            y = super().forward(x)
            return y if bias is None else y + bias if mask is None else y * mask

    model, x, other = Masked(4, 4).train(), torch.randn(2, 4), torch.randn(2, 4)
    model.forward = Captures(model)
    model(x, mask=other, bias=None)
    torch.testing.assert_close(
        model(x, mask=None, bias=other), nn.functional.linear(x, model.weight, model.bias) + other
    )
    assert model.forward.captures == 2


def test_arguments_that_are_no_tensors_are_named_in_training():
    class Sums(nn.Linear):
        def forward(self, images):
            return sum(super(Sums, self).forward(image).sum() for image in images)

    model = Sums(4, 2).train()
    model.forward = GraphedTraining(model)
    with pytest.raises(UserError, match="cuda_graph: Sums cannot be captured: it is called with a list; expected"):
        model([torch.ones(4)])
    with torch.no_grad():
        assert model.eval()([torch.ones(4)]).isfinite()
    model.forward = GraphedInference(model)
    assert model.train()([torch.ones(4)]).isfinite()  # in evaluation alone


@pytest.mark.parametrize("design", ["hyper_connections", "alt_up", "mhc"])
def test_gradients_are_taken_as_outside_of_autocast(design):
    """What computes in float32 within autocast has float32's gradients."""
    model, x = vit(), images()
    model.blocks = connect(model.blocks, design)
    stirred(model, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    seed = torch.linspace(-1, 1, logits.numel()).view(logits.shape).to(logits.dtype)
    expected = torch.autograd.grad(logits, weights, seed, allow_unused=True, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients_of([logits], weights, [seed])
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True) if pair[1] is not None)


def test_each_gradient_has_memory_of_its_own():
    one, other, third = (nn.Parameter(torch.randn(3)) for _ in range(3))
    y = one + other
    found = gradients_of([y, y.detach()], [one, other, third], [torch.ones(3)])
    assert torch.equal(found[0], found[1]) and found[0].data_ptr() != found[1].data_ptr() and found[2] is None


def test_outputs_that_would_not_be_replayed_are_named():
    @dataclass
    class Output:
        logits: Tensor

    x = torch.ones(2)
    assert tensors_of({"logits": x, "states": (x, None), "scale": 2.0}) == [x, x]
    with pytest.raises(RuntimeError, match="it returns a Output"):
        tensors_of((x, Output(x)))


def test_a_backward_pass_runs_once_and_before_the_next_forward_pass(monkeypatch):
    class Replay:
        def __init__(self, what):
            self.what = what

        def replay(self):
            self.what()

    weight = nn.Parameter(torch.tensor([2.0, 3.0]))
    passes = cuda_graph._Passes.__new__(cuda_graph._Passes)
    passes.weights, passes.number, passes.differentiable = [weight], 0, [True]
    passes.inputs, passes.output_gradients = [torch.zeros(2)], [torch.zeros(2)]
    passes.gradients, passes.leaves = [torch.zeros(2)], [torch.zeros(2), 5]
    passes.structure = torch.utils._pytree.tree_flatten((torch.zeros(2), 5))[1]

    def forward():
        passes.leaves[0].copy_(passes.inputs[0] * weight.detach())
        passes.gradients[0].fill_(float("inf"))  # the forward pass's memory is the gradients' too

    passes.is_read = SimpleNamespace(wait=lambda stream: None, record=lambda stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    passes.forward_graph = Replay(forward)
    passes.backward_graph = Replay(lambda: passes.gradients[0].copy_(passes.inputs[0] * passes.output_gradients[0]))
    for x in (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])):
        y, constant = passes([x])
        y.sum().backward()
    assert constant == 5 and weight.grad.tolist() == [4.0, 6.0]  # added up
    first, _ = passes([torch.ones(2)])
    second, _ = passes([torch.ones(2)])
    assert first.tolist() == [2.0, 3.0]
    with pytest.raises(UserError, match="called again before this backward pass"):
        first.sum().backward()
    second.sum().backward(retain_graph=True)
    with pytest.raises(UserError, match="or this is a second one"):
        second.sum().backward()
