"""StepsNet works with PyTorch's tools: checkpointing, compilers, export, scripts, copies, DDP."""

import copy
import pickle
import weakref
from collections import Counter

import pytest
import torch
from step_networks import (
    PROFILES,
    WIDTHS,
    assert_same_gradients,
    compose,
    gradients,
    make,
    nested_steps,
    stream,
)
from torch import nn

from stepsnet import StepsNet

torch.set_num_threads(1)  # xdist already uses the cores

NETWORKS = {name: PROFILES[name] for name in ("steps", "any")} | {"nested": None}
EVERY_NETWORK = pytest.mark.parametrize("widths", NETWORKS.values(), ids=NETWORKS)


def build(widths):
    return nested_steps()[0] if widths is None else make(widths)


@EVERY_NETWORK
def test_gradcheck(widths):
    net = build(widths).double()
    x = stream(2, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(net, (x,), fast_mode=True)


@EVERY_NETWORK
def test_gradient_checkpointing_gives_the_same_gradients(widths):
    net, x = build(widths), stream(2, 5, 9)
    expected, plain = gradients(net, net, x), net(x)
    for enable in (True, False):
        net.set_grad_checkpointing(enable)
        torch.testing.assert_close(net(x), plain)
        torch.testing.assert_close(compose(net, x), plain)
        assert_same_gradients(gradients(net, net, x), expected)
        assert_same_gradients(gradients(lambda x: compose(net, x), net, x), expected)


def saved_sizes(function, x):
    """The elements of every tensor that is kept for the backward pass."""
    seen = []

    def pack(tensor):
        seen.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(x)
    return sorted(size for size in seen if size)


@EVERY_NETWORK
def test_gradient_checkpointing_keeps_each_blocks_own_input(widths):
    """One input a block, as narrow as the block: not the whole stream, and not what a block saves inside."""
    net, x = build(widths), stream(2, 5, 9, requires_grad=True)
    own = sorted(2 * 5 * block.fc.in_features for block in net)
    assert sum(saved_sizes(net, x)) > sum(own)
    net.set_grad_checkpointing()
    assert saved_sizes(net, x) == own
    assert saved_sizes(lambda x: compose(net, x), x) == own


@EVERY_NETWORK
def test_autocast(widths):
    net, x = build(widths), stream(2, 5, 9)
    with torch.autocast("cpu", torch.bfloat16):
        y = net(x)
        torch.testing.assert_close(compose(net, x), y)
    assert y.dtype == torch.float32  # the shortcut's
    torch.testing.assert_close(y, net(x), rtol=0.02, atol=0.02)
    assert not torch.equal(y, net(x))


def test_autocast_of_networks_without_a_shortcut():
    net = StepsNet([nn.Linear(width, width) for width in WIDTHS], WIDTHS)
    x = stream(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        y = net(x)  # bfloat16 and float32 slices meet in a concatenation
    torch.testing.assert_close(y.float(), net(x), rtol=0.02, atol=0.02)


@EVERY_NETWORK
def test_compile_without_a_graph_break(widths):
    net, x = build(widths), stream(2, 5, 9)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), net(x))


def test_compile_of_a_checkpointed_network_with_its_backward_pass():
    net, x = make(WIDTHS), stream(2, 5, 9)
    net.set_grad_checkpointing()
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert_same_gradients(gradients(compiled, net, x), gradients(net, net, x))


@EVERY_NETWORK
def test_export(widths):
    net, x = build(widths), stream(2, 5, 9)
    batch, tokens = torch.export.Dim("batch"), torch.export.Dim("tokens")
    program = torch.export.export(net, (x,), dynamic_shapes=({0: batch, 1: tokens},))
    for shape in ((2, 5, 9), (3, 7, 9)):
        torch.testing.assert_close(program.module()(stream(*shape)), net(stream(*shape)))


@EVERY_NETWORK
def test_functional_call(widths):
    net, other, x = build(widths), build(widths), stream(2, 5, 9)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-2)
    parameters = dict(other.named_parameters())
    torch.testing.assert_close(torch.func.functional_call(net, parameters, (x,)), other(x))

    def loss(parameters, x):
        y = torch.func.functional_call(net, parameters, (x,))
        return (y * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum()

    assert_same_gradients(list(torch.func.grad(loss)(parameters, x).values()), gradients(other, other, x)[1:])
    torch.testing.assert_close(torch.func.vmap(net)(x), net(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@EVERY_NETWORK
def test_script(widths, tmp_path):
    net, x = build(widths), stream(2, 5, 9)
    net.set_grad_checkpointing()  # has no meaning in a script, and does no harm
    scripted = torch.jit.script(net)
    torch.testing.assert_close(scripted(x), net(x))
    torch.jit.save(scripted, tmp_path / "net.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "net.pt")(stream(3, 9)), net(stream(3, 9)))
    with pytest.raises(torch.jit.Error, match="expected 9"):
        scripted(stream(2, 8))


@EVERY_NETWORK
def test_symbolic_trace(widths):
    net, x = build(widths), stream(2, 5, 9)
    traced = torch.fx.symbolic_trace(net)
    torch.testing.assert_close(traced(x), net(x))
    targets = Counter(getattr(node.target, "__name__", node.target) for node in traced.graph.nodes)
    assert targets["check_stream"] > 0
    if widths == WIDTHS:
        assert targets["split"] == 1 and targets["cat"] == 2


def test_what_a_trace_keeps_whole_returns_one_tensor():
    """As quantization by torch.fx asks, which observes what each call returns."""
    traced = torch.fx.symbolic_trace(build(WIDTHS))
    returned = {}

    class Watched(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            returned[target] = super().call_function(target, args, kwargs)
            return returned[target]

    Watched(traced).run(stream(2, 5, 9))
    ours = [value for target, value in returned.items() if target.__module__.startswith("stepsnet")]
    assert ours and all(isinstance(value, torch.Tensor) for value in ours)


def test_a_block_of_the_loop_is_itself_and_no_module():
    blocks = build(WIDTHS)
    assert blocks[1] == blocks[1] != blocks[2] and len({*blocks, *blocks}) == len(blocks)
    assert weakref.ref(first := blocks[0])() is first
    said = r"as a function of the whole stream, expected the module itself, which is its \.block"
    with pytest.raises(TypeError, match=said):
        nn.Sequential(*blocks[0])


@EVERY_NETWORK
def test_copies_and_pickles(widths, tmp_path):
    net, x = build(widths), stream(2, 5, 9)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(x), net(x))
        assert all(mine is not theirs for mine, theirs in zip(net.parameters(), other.parameters()))
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    other = build(widths)
    nn.init.zeros_(next(other.parameters()))
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(other(x), net(x))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@EVERY_NETWORK
def test_distributed_data_parallel(widths, tmp_path):
    net, x = build(widths), stream(4, 9)
    expected = gradients(net, net, x)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(net)
        assert_same_gradients(gradients(parallel, net, x), expected)
        net.set_grad_checkpointing()
        assert_same_gradients(gradients(parallel, net, x), expected)
    finally:
        torch.distributed.destroy_process_group()


def test_meta_device():
    with torch.device("meta"):
        net = make((192, 272, 384))
        assert net(torch.empty(2, 197, 384)).shape == (2, 197, 384)


@pytest.mark.parametrize("widths", PROFILES.values(), ids=PROFILES)
def test_channels_last_images_keep_their_format(widths):
    """A concatenation of channels-last slices stays so: convolutions need not copy."""
    net = StepsNet([nn.Conv2d(width, width, 3, padding=1) for width in widths], widths, dim=1)
    x = stream(2, 9, 4, 4).contiguous(memory_format=torch.channels_last)
    y = net.to(memory_format=torch.channels_last)(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, net(x.contiguous()), rtol=1e-4, atol=1e-5)


def test_the_keys_of_a_state_dict():
    net = make(WIDTHS, (2, 0, 1))
    names = ["networks.0.0", "networks.0.1", "networks.2.0"]
    assert list(net.state_dict()) == [f"{block}.fc.{name}" for block in names for name in ("weight", "bias")]
    assert "widths=(4, 6, 9), dim=-1" in repr(net)
