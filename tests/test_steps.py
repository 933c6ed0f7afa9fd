"""StepsNet is Eq. (5) and ReverseStepsNet is Eq. (6), and both are good citizens of PyTorch."""

import copy
import pickle
from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stepsnet import ReverseStepsNet, StepsNet

torch.set_num_threads(1)  # xdist already uses the cores; so small kernels gain nothing from more

WIDTHS = (4, 6, 9)
DESIGNS = [pytest.param(StepsNet, WIDTHS, id="steps"), pytest.param(ReverseStepsNet, WIDTHS[::-1], id="reverse")]


class Block(nn.Module):
    """A residual block that mixes all of its channels: x + tanh(W x + b)."""

    def __init__(self, width, dim=-1):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.dim = dim

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * torch.tanh(self.fc(x.movedim(self.dim, -1))).movedim(-1, self.dim)


def blocks(width, depth=1, dim=-1):
    return nn.Sequential(*(Block(width, dim) for _ in range(depth)))


def make(design, widths, depths=(2, 1, 3), dim=-1):
    torch.manual_seed(0)
    return design([blocks(width, depth, dim) for width, depth in zip(widths, depths)], widths, dim)


def stream(*shape, dtype=torch.float32, requires_grad=False):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(requires_grad)


def compose(net, x):
    for block in net:
        x = block(x)
    return x


def gradients(function, module, x):
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = function(x)
    # a weighted sum, so that a permutation of the output changes the gradients
    (y * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum().backward()
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


def assert_same_gradients(ours, theirs):
    assert len(ours) == len(theirs) > 1
    for mine, expected in zip(ours, theirs):
        torch.testing.assert_close(mine, expected)


SHAPES = [
    pytest.param(-1, (9,), id="C"),
    pytest.param(-1, (5, 9), id="B,C"),
    pytest.param(-1, (2, 5, 9), id="B,N,C"),
    pytest.param(-1, (2, 3, 4, 9), id="B,H,W,C"),
    pytest.param(-1, (2, 1, 2, 3, 9), id="B,T,H,W,C"),
    pytest.param(1, (2, 9, 3, 4), id="B,C,H,W"),
    pytest.param(1, (2, 9), id="dim 1 is last"),
    pytest.param(-3, (2, 9, 3, 4), id="dim -3"),
    pytest.param(0, (9, 3), id="dim 0"),
]


# ---- the equations


@pytest.mark.parametrize("dim, shape", SHAPES)
def test_steps_is_eq_5(dim, shape):
    """y_1 = F_1(x_1), y_i = F_i([y_{i-1}, x_i])."""
    net = make(StepsNet, WIDTHS, dim=dim)
    f1, f2, f3 = net.networks
    x = stream(*shape)
    x1, x2, x3 = x.split([4, 2, 3], dim)
    y1 = f1(x1)
    y2 = f2(torch.cat([y1, x2], dim))
    y3 = f3(torch.cat([y2, x3], dim))
    assert net(x).shape == x.shape
    torch.testing.assert_close(net(x), y3)


@pytest.mark.parametrize("dim, shape", SHAPES)
def test_reverse_is_eq_6(dim, shape):
    """x_{i+1}, y_i = Split(F_i(x_i)), y_n = F_n(x_n), and the output is [y_1, …, y_n]."""
    net = make(ReverseStepsNet, (9, 6, 4), dim=dim)
    f1, f2, f3 = net.networks
    x1 = stream(*shape)
    x2, y1 = f1(x1).split([6, 3], dim)
    x3, y2 = f2(x2).split([4, 2], dim)
    y3 = f3(x3)
    assert net(x1).shape == x1.shape
    torch.testing.assert_close(net(x1), torch.cat([y1, y2, y3], dim))


def test_each_step_is_blind_to_later_slices():
    """What the design is for: the first slices of the output of step i depend on x_1 … x_i only."""
    net = make(StepsNet, WIDTHS, depths=(2, 1, 0))
    x = stream(3, 9)
    other = x.clone()
    other[:, 6:] += 1  # x_3
    torch.testing.assert_close(net(x)[:, :6], net(other)[:, :6], rtol=0, atol=0)
    torch.testing.assert_close(net(x)[:, 6:], x[:, 6:], rtol=0, atol=0)


@pytest.mark.parametrize("design", [StepsNet, ReverseStepsNet])
def test_one_step_is_f_1_itself(design):
    f1 = blocks(6, 3)
    net = design([f1], (6,))
    x = stream(2, 5, 6)
    torch.testing.assert_close(net(x), f1(x))
    assert net.networks[0] is f1


@pytest.mark.parametrize("empty", range(3))
def test_an_empty_step_passes_its_channels_through(empty):
    depths = [2, 2, 2]
    depths[empty] = 0
    net = make(StepsNet, WIDTHS, depths)
    x = stream(2, 9)
    y = x
    for width, network in zip(WIDTHS, net.networks):
        y = torch.cat([network(y[:, :width]), y[:, width:]], 1)
    torch.testing.assert_close(net(x), y)
    assert len(net) == 4


def test_empty_networks_only():
    x = stream(2, 9)
    steps = StepsNet([nn.Sequential() for _ in WIDTHS], WIDTHS)
    assert torch.equal(steps(x), x) and torch.equal(compose(steps, x), x)
    reverse = ReverseStepsNet([nn.Sequential() for _ in WIDTHS], WIDTHS[::-1])
    assert torch.equal(reverse(x), torch.cat([x[:, 6:], x[:, 4:6], x[:, :4]], 1))  # [y_1, y_2, y_3]


def test_a_network_may_be_one_module_or_come_from_a_generator():
    torch.manual_seed(0)
    f1, f2 = Block(4), Block(6)
    net = StepsNet((f for f in (f1, f2)), [4, 6])
    x = stream(2, 6)
    torch.testing.assert_close(net(x), f2(torch.cat([f1(x[:, :4]), x[:, 4:]], 1)))
    assert len(net) == 2 and net.widths == (4, 6) and net.width == 6


# ---- nesting and composition


def nested_steps():
    torch.manual_seed(0)
    f1, f2, f3 = blocks(4, 2), blocks(6, 1), blocks(9, 2)
    return StepsNet([StepsNet([f1, f2], (4, 6)), f3], (6, 9)), StepsNet([f1, f2, f3], WIDTHS)


def test_nesting_two_steps_gives_three():
    """Fig. 4(c): a 2-step network inside a step."""
    nested, flat = nested_steps()
    x = stream(2, 5, 9)
    torch.testing.assert_close(nested(x), flat(x))
    assert len(nested) == len(flat) == 5


def reverse_inside_steps():
    torch.manual_seed(0)
    return StepsNet([make(ReverseStepsNet, (6, 4), (2, 1)), blocks(9, 1)], (6, 9))


def steps_inside_reverse():
    torch.manual_seed(0)
    return ReverseStepsNet([blocks(9, 1), make(StepsNet, (4, 6), (2, 1)), blocks(3, 1)], (9, 6, 3))


COMPOSED = {
    "steps": lambda: make(StepsNet, WIDTHS),
    "reverse": lambda: make(ReverseStepsNet, WIDTHS[::-1]),
    "one step": lambda: make(StepsNet, (9,), (3,)),
    "one step, reverse": lambda: make(ReverseStepsNet, (9,), (3,)),
    "first step empty": lambda: make(StepsNet, WIDTHS, (0, 1, 1)),
    "last step empty": lambda: make(StepsNet, WIDTHS, (2, 1, 0)),
    "reverse, last step empty": lambda: make(ReverseStepsNet, WIDTHS[::-1], (2, 1, 0)),
    "reverse, first step empty": lambda: make(ReverseStepsNet, WIDTHS[::-1], (0, 1, 2)),
    "nested": lambda: nested_steps()[0],
    "reverse inside steps": reverse_inside_steps,
    "steps inside reverse": steps_inside_reverse,
    "single modules": lambda: StepsNet([Block(4), nn.Sequential(), Block(9)], WIDTHS),
}


@pytest.mark.parametrize("build", COMPOSED.values(), ids=COMPOSED)
def test_the_composition_of_the_blocks_is_the_container(build):
    net = build()
    x = stream(2, 5, 9)
    torch.testing.assert_close(compose(net, x), net(x))
    assert_same_gradients(gradients(lambda x: compose(net, x), net, x), gradients(net, net, x))


def test_the_composition_along_dim_1():
    for design, widths in ((StepsNet, WIDTHS), (ReverseStepsNet, WIDTHS[::-1])):
        net = make(design, widths, dim=1)
        x = stream(2, 9, 3, 2)
        torch.testing.assert_close(compose(net, x), net(x))


def test_a_stream_block_rewrites_its_own_channels_only():
    net = make(StepsNet, WIDTHS)
    x = stream(2, 9)
    for block, width in zip(net, (4, 4, 6, 9, 9, 9)):
        y = block(x)
        assert block.width == width and y.shape == x.shape
        torch.testing.assert_close(y[:, :width], block.block(x[:, :width]))
        torch.testing.assert_close(y[:, width:], x[:, width:], rtol=0, atol=0)
    before = x.clone()
    compose(net, x)
    assert torch.equal(x, before)


def test_a_stream_block_passes_arguments_and_attributes_on():
    net = make(StepsNet, WIDTHS)
    x = stream(2, 9)
    assert torch.equal(net[0](x, scale=0.0), x)
    assert net[0].fc is net.networks[0][0].fc
    with pytest.raises(AttributeError):
        _ = net[0].nothing


def test_a_stream_block_can_be_copied():
    net = make(StepsNet, WIDTHS)
    x = stream(2, 9)
    assert torch.equal(copy.deepcopy(net[0])(x), net[0](x))


# ---- a sequence


@pytest.mark.parametrize("design, widths", DESIGNS)
def test_length_and_indices(design, widths):
    net = make(design, widths)
    flat = [block for network in net.networks for block in network]
    assert len(net) == len(list(net)) == len(flat) == 6
    assert [stream_block.block for stream_block in net] == flat
    assert [net[i].block for i in range(-6, 6)] == flat + flat
    assert [stream_block.width for stream_block in net] == [w for w, d in zip(widths, (2, 1, 3)) for _ in range(d)]
    for index in (6, -7):
        with pytest.raises(IndexError):
            net[index]


SLICES = [slice(None), slice(3), slice(1, 4), slice(-2, None), slice(None, None, 2), slice(2, 2), slice(0, 99)]


@pytest.mark.parametrize("index", SLICES, ids=str)
@pytest.mark.parametrize("design, widths", DESIGNS)
def test_a_slice_holds_the_same_modules_under_the_same_names(design, widths, index):
    net = make(design, widths, dim=1)
    part = net[index]
    kept = dict(list(net.named_parameters())[2 * i + j] for i in range(6)[index] for j in range(2))
    assert type(part) is design and part.widths == net.widths and part.dim == net.dim
    assert len(part) == len(range(6)[index])
    assert part.state_dict().keys() == kept.keys()
    assert all(dict(part.named_parameters())[name] is parameter for name, parameter in kept.items())


def test_slices_of_steps_compose():
    for net in (make(StepsNet, WIDTHS), nested_steps()[0]):
        x = stream(2, 9)
        for cut in range(len(net) + 1):
            torch.testing.assert_close(net[cut:](net[:cut](x)), net(x))


def test_slices_of_reverse_compose():
    for net in (make(ReverseStepsNet, WIDTHS[::-1]), reverse_inside_steps(), steps_inside_reverse()):
        x = stream(2, 9)
        for cut in range(len(net) + 1):
            torch.testing.assert_close(net[cut:](net[:cut](x)), net(x))


@pytest.mark.parametrize("cut", range(1, 6))
def test_the_start_of_a_reverse_network_leaves_the_stream_as_its_iteration_does(cut):
    net = make(ReverseStepsNet, WIDTHS[::-1])
    x = z = stream(2, 9)
    for block in list(net)[:cut]:
        z = block(z)
    torch.testing.assert_close(compose(net[:cut], x), z)
    torch.testing.assert_close(net[:cut](x), z)


def test_a_slice_keeps_training_mode_and_checkpointing():
    net = make(StepsNet, WIDTHS).eval()
    net.set_grad_checkpointing()
    assert not net[:3].training and net[:3].grad_checkpointing
    assert net.train()[:3].training


def test_a_slice_of_single_modules():
    net = StepsNet([Block(4), Block(6), Block(9)], WIDTHS)
    x = stream(2, 9)
    part = net[1:2]
    assert len(part) == 1
    expected = torch.cat([net.networks[1](x[:, :6]), x[:, 6:]], 1)
    torch.testing.assert_close(part(x), expected)


# ---- its cost


class Operations(TorchDispatchMode):
    """The ATen operations below this point, by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("dim", [-1, 1])
@pytest.mark.parametrize("build", [nn.Identity, lambda: nn.Sequential(*[nn.Identity()] * 4)])
def test_one_split_and_a_concatenation_a_step(n, dim, build):
    """The rule of the house: what the macro design itself costs does not depend on the number of blocks."""
    widths = tuple(range(2, 2 + n))
    x = torch.zeros(1, widths[-1], widths[-1])
    with Operations() as steps:
        StepsNet([build() for _ in widths], widths, dim)(x)
    with Operations() as reverse:
        ReverseStepsNet([build() for _ in widths], widths[::-1], dim)(x)
    assert steps.names == (Counter(split_with_sizes=1, cat=n - 1) if n > 1 else Counter())
    assert reverse.names == (Counter(split_with_sizes=n - 1, cat=1) if n > 1 else Counter())


# ---- errors


@pytest.mark.parametrize("design", [StepsNet, ReverseStepsNet])
@pytest.mark.parametrize(
    "widths, error, message",
    [
        ((4,), ValueError, "got 2 networks and 1 widths"),
        ((4, 6, 9), ValueError, "got 2 networks and 3 widths"),
        ((), ValueError, "got 2 networks and 0 widths"),
        ((0, 6), ValueError, "step 1: got 0, expected a positive whole number"),
        ((4, -6), ValueError, "step 2: got -6, expected a positive whole number"),
        ((4.0, 6), ValueError, r"step 1: got 4\.0, expected a positive whole number"),
        (("4", 6), ValueError, "step 1: got '4', expected a positive whole number"),
        ((True, 6), ValueError, "step 1: got True, expected a positive whole number"),
        ((4, 4), ValueError, "step 2: got 4, expected (more|less) than the 4 of step 1"),
    ],
)
def test_wrong_widths(design, widths, error, message):
    with pytest.raises(error, match=message):
        design([nn.Identity(), nn.Identity()], widths)


def test_no_networks():
    with pytest.raises(ValueError, match="got 0 networks"):
        StepsNet([], ())


def test_widths_out_of_order():
    networks = [nn.Identity() for _ in range(3)]
    with pytest.raises(ValueError, match="step 3: got 5, expected more than the 6 of step 2"):
        StepsNet(networks, (4, 6, 5))
    with pytest.raises(ValueError, match="step 2: got 6, expected less than the 4 of step 1"):
        ReverseStepsNet(networks, (4, 6, 5))


@pytest.mark.parametrize("design, widths", [(StepsNet, (4, 6)), (ReverseStepsNet, (6, 4))])
def test_a_network_that_is_no_module(design, widths):
    with pytest.raises(TypeError, match=r"network 2: got function, expected an nn\.Module"):
        design([nn.Identity(), lambda x: x], widths)


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("design, widths", DESIGNS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_network_that_changes_its_width(design, widths, step, checkpointed):
    networks = [nn.Identity() for _ in widths]
    networks[step - 1] = nn.Linear(widths[step - 1], widths[step - 1] + 7)
    net = design(networks, widths)
    net.set_grad_checkpointing(checkpointed)
    got, expected = widths[step - 1] + 7, widths[step - 1]
    with pytest.raises(ValueError, match=f"output of step {step} .*got {got} channels, expected {expected}"):
        net(stream(2, 9))


@pytest.mark.parametrize("got", [1, 8, 10])
@pytest.mark.parametrize("dim", [-1, 1])
@pytest.mark.parametrize("design, widths", DESIGNS)
def test_an_input_of_another_width(design, widths, dim, got):
    with pytest.raises(ValueError, match=f"got {got} channels, expected 9"):
        make(design, widths, dim=dim)(stream(2, *((got, 9) if dim == 1 else (9, got))))


@pytest.mark.parametrize("design", [StepsNet, ReverseStepsNet])
def test_one_step_checks_its_input_too(design):
    with pytest.raises(ValueError, match="got 7 channels, expected 6"):
        design([nn.Identity()], (6,))(stream(2, 7))


# ---- PyTorch's machinery

MACHINERY = [*DESIGNS, pytest.param("nested", None, id="nested")]


def build(design, widths):
    return nested_steps()[0] if design == "nested" else make(design, widths)


@pytest.mark.parametrize("build", COMPOSED.values(), ids=COMPOSED)
def test_gradcheck(build):
    net = build().double()
    x = stream(2, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(net, (x,), fast_mode=True)
    names = [name for name, _ in net.named_parameters()]

    def of_parameters(*values):
        return torch.func.functional_call(net, dict(zip(names, values)), (x.detach(),))

    assert torch.autograd.gradcheck(of_parameters, tuple(net.parameters()), fast_mode=True)


@pytest.mark.parametrize("design, widths", MACHINERY)
def test_gradient_checkpointing_gives_the_same_gradients(design, widths):
    net, x = build(design, widths), stream(2, 5, 9)
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


@pytest.mark.parametrize("design, widths", MACHINERY)
def test_gradient_checkpointing_keeps_each_blocks_own_input(design, widths):
    """One input a block, as narrow as the block: not the whole stream, and not what a block saves inside."""
    net, x = build(design, widths), stream(2, 5, 9, requires_grad=True)
    own = sorted(2 * 5 * block.fc.in_features for block in net)
    assert sum(saved_sizes(net, x)) > sum(own)
    net.set_grad_checkpointing()
    assert saved_sizes(net, x) == own
    assert saved_sizes(lambda x: compose(net, x), x) == own


@pytest.mark.parametrize("design, widths", MACHINERY)
def test_autocast(design, widths):
    net, x = build(design, widths), stream(2, 5, 9)
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


@pytest.mark.parametrize("design, widths", MACHINERY)
def test_compile_without_a_graph_break(design, widths):
    net, x = build(design, widths), stream(2, 5, 9)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), net(x))


def test_compile_of_a_checkpointed_network_with_its_backward_pass():
    net, x = make(StepsNet, WIDTHS), stream(2, 5, 9)
    net.set_grad_checkpointing()
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert_same_gradients(gradients(compiled, net, x), gradients(net, net, x))


@pytest.mark.parametrize("design, widths", MACHINERY)
def test_export(design, widths):
    net, x = build(design, widths), stream(2, 5, 9)
    batch, tokens = torch.export.Dim("batch"), torch.export.Dim("tokens")
    program = torch.export.export(net, (x,), dynamic_shapes=({0: batch, 1: tokens},))
    for shape in ((2, 5, 9), (3, 7, 9)):
        torch.testing.assert_close(program.module()(stream(*shape)), net(stream(*shape)))


@pytest.mark.parametrize("design, widths", MACHINERY)
def test_functional_call(design, widths):
    net, other, x = build(design, widths), build(design, widths), stream(2, 5, 9)
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
@pytest.mark.parametrize("design, widths", MACHINERY)
def test_script(design, widths, tmp_path):
    net, x = build(design, widths), stream(2, 5, 9)
    net.set_grad_checkpointing()  # has no meaning in a script, and does no harm
    scripted = torch.jit.script(net)
    torch.testing.assert_close(scripted(x), net(x))
    torch.jit.save(scripted, tmp_path / "net.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "net.pt")(stream(3, 9)), net(stream(3, 9)))
    with pytest.raises(torch.jit.Error, match="expected 9"):
        scripted(stream(2, 8))


@pytest.mark.parametrize("design, widths", MACHINERY)
def test_symbolic_trace(design, widths):
    net, x = build(design, widths), stream(2, 5, 9)
    traced = torch.fx.symbolic_trace(net)
    torch.testing.assert_close(traced(x), net(x))
    targets = Counter(getattr(node.target, "__name__", node.target) for node in traced.graph.nodes)
    assert targets["_check_width"] > 0
    if design is StepsNet:
        assert targets["split"] == 1 and targets["cat"] == 2


@pytest.mark.parametrize("design, widths", MACHINERY)
def test_copies_and_pickles(design, widths, tmp_path):
    net, x = build(design, widths), stream(2, 5, 9)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(x), net(x))
        assert all(mine is not theirs for mine, theirs in zip(net.parameters(), other.parameters()))
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    other = build(design, widths)
    nn.init.zeros_(next(other.parameters()))
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(other(x), net(x))


def test_the_keys_of_a_state_dict():
    net = make(StepsNet, WIDTHS, (2, 0, 1))
    blocks = ["networks.0.0", "networks.0.1", "networks.2.0"]
    assert list(net.state_dict()) == [f"{block}.fc.{name}" for block in blocks for name in ("weight", "bias")]
    assert "widths=(4, 6, 9), dim=-1" in repr(net)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("design, widths", MACHINERY)
def test_distributed_data_parallel(design, widths, tmp_path):
    net, x = build(design, widths), stream(4, 9)
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
        net = make(StepsNet, (192, 272, 384))
        assert net(torch.empty(2, 197, 384)).shape == (2, 197, 384)


@pytest.mark.parametrize("widths", [(4, 6, 9), (9, 6, 4)])
def test_channels_last_images_keep_their_format(widths):
    """A concatenation of channels-last slices stays so: convolutions need not copy."""
    design = StepsNet if widths[0] == 4 else ReverseStepsNet
    net = design([nn.Conv2d(width, width, 3, padding=1) for width in widths], widths, dim=1)
    x = stream(2, 9, 4, 4).contiguous(memory_format=torch.channels_last)
    y = net.to(memory_format=torch.channels_last)(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, net(x.contiguous()), rtol=1e-4, atol=1e-5)


def test_adjacent_widths_add_up():
    net = make(StepsNet, WIDTHS)
    assert net.slice_widths == [WIDTHS[0], *(wide - narrow for narrow, wide in pairwise(WIDTHS))]
    assert sum(net.slice_widths) == net.width
