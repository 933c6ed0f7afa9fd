"""StepsNet is Eq. (5), Eq. (6) and every other profile of widths by one rule, at the cost of a few copies."""

import copy
import random
from collections import Counter
from itertools import pairwise

import pytest
import torch
from step_networks import (
    DEPTHS,
    PROFILES,
    WIDTHS,
    Block,
    assert_same_gradients,
    blocks,
    compose,
    gradients,
    make,
    nested_steps,
    steps_inside_reverse,
    stream,
    write_out,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stepsnet import ReverseStepsNet, StepsNet
from stepsnet.models.blocks import widths_of
from stepsnet.models.stepify.sequence import StepSequence
from stepsnet.residual import connect

torch.set_num_threads(1)  # xdist already uses the cores

EVERY_PROFILE = pytest.mark.parametrize("widths", PROFILES.values(), ids=PROFILES)
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
    """y_1 = F_1(x_1), y_i = F_i([y_{i-1}, x_i]), to the bit."""
    net = make(WIDTHS, dim=dim)
    f1, f2, f3 = net.networks
    x = stream(*shape)
    x1, x2, x3 = x.split([4, 2, 3], dim)
    y1 = f1(x1)
    y2 = f2(torch.cat([y1, x2], dim))
    y3 = f3(torch.cat([y2, x3], dim))
    assert net(x).shape == x.shape
    assert torch.equal(net(x), y3)


@pytest.mark.parametrize("dim, shape", SHAPES)
def test_reverse_is_eq_6(dim, shape):
    """x_{i+1}, y_i = Split(F_i(x_i)), y_n = F_n(x_n); Eq. (6) writes the output's channels as [y_1, …, y_n]."""
    net = make((9, 6, 4), dim=dim, design=ReverseStepsNet)
    f1, f2, f3 = net.networks

    def eq_6(x1):
        x2, y1 = f1(x1).split([6, 3], dim)
        x3, y2 = f2(x2).split([4, 2], dim)
        return torch.cat([y1, y2, f3(x3)], dim)

    def in_its_order(x):
        y3, y2, y1 = net(x).split([4, 2, 3], dim)
        return torch.cat([y1, y2, y3], dim)

    x = stream(*shape)
    assert net(x).shape == x.shape
    torch.testing.assert_close(in_its_order(x), eq_6(x))
    assert_same_gradients(gradients(in_its_order, net, x), gradients(eq_6, net, x))


@pytest.mark.parametrize("seed", range(40))
def test_any_widths_are_the_rule_written_out(seed):
    """Random widths, equal ones and empty steps among them: output, gradients, iteration and slices."""
    random.seed(seed)
    widths = [random.randint(1, 8) for _ in range(random.randint(1, 6))]
    depths = [random.randint(0, 2) for _ in widths]
    dim = random.choice([-1, 1])
    net = make(widths, depths, dim)
    x = stream(3, max(widths), 2) if dim == 1 else stream(3, 2, max(widths))

    def written_out(x):
        return write_out(net.networks, widths, x, dim)

    torch.testing.assert_close(net(x), written_out(x))  # not bit for bit: some processors round by the layout
    torch.testing.assert_close(compose(net, x), net(x))
    if len(net):
        expected = gradients(written_out, net, x)
        assert_same_gradients(gradients(net, net, x), expected)
        assert_same_gradients(gradients(lambda x: compose(net, x), net, x), expected)
    for cut in range(len(net) + 1):
        torch.testing.assert_close(net[cut:](net[:cut](x)), net(x))


def test_each_step_is_blind_to_later_slices():
    """What the design is for: the first slices of the output of step i depend on x_1 … x_i only."""
    net = make(WIDTHS, depths=(2, 1, 0))
    x = stream(3, 9)
    other = x.clone()
    other[:, 6:] += 1  # x_3
    torch.testing.assert_close(net(x)[:, :6], net(other)[:, :6], rtol=0, atol=0)
    torch.testing.assert_close(net(x)[:, 6:], x[:, 6:], rtol=0, atol=0)


def test_one_step_is_f_1_itself():
    f1 = blocks(6, 3)
    net = StepsNet([f1], (6,))
    x = stream(2, 5, 6)
    assert torch.equal(net(x), f1(x)) and net.networks[0] is f1


@EVERY_PROFILE
def test_empty_networks_pass_the_stream_through(widths):
    net = make(widths, [0] * len(widths))
    x = stream(2, 9)
    assert torch.equal(net(x), x) and torch.equal(compose(net, x), x) and len(net) == 0


def test_a_network_may_be_one_module_or_come_from_a_generator():
    torch.manual_seed(0)
    f1, f2 = Block(4), Block(6)
    net = StepsNet((f for f in (f1, f2)), [4, 6])
    x = stream(2, 6)
    torch.testing.assert_close(net(x), f2(torch.cat([f1(x[:, :4]), x[:, 4:]], 1)))
    assert len(net) == 2 and net.widths == (4, 6) and net.width == 6


# ---- nesting and composition


def test_nesting_two_steps_gives_three():
    """Fig. 4(c): a 2-step network inside a step."""
    nested, flat = nested_steps()
    x = stream(2, 5, 9)
    torch.testing.assert_close(nested(x), flat(x))
    assert len(nested) == len(flat) == 5


COMPOSED = {
    **{name: lambda widths=widths: make(widths) for name, widths in PROFILES.items()},
    "nested": lambda: nested_steps()[0],
    "reverse inside steps": lambda: StepsNet([make((6, 4), (2, 1), design=ReverseStepsNet), blocks(9, 1)], (6, 9)),
    "steps inside reverse": steps_inside_reverse,
    "single modules": lambda: StepsNet([Block(4), nn.Sequential(), Block(9)], WIDTHS),
}


@pytest.mark.parametrize("build", COMPOSED.values(), ids=COMPOSED)
def test_the_composition_of_blocks_and_of_slices_is_the_container(build):
    net = build()
    x = stream(2, 5, 9)
    torch.testing.assert_close(compose(net, x), net(x))
    assert_same_gradients(gradients(lambda x: compose(net, x), net, x), gradients(net, net, x))
    for cut in range(len(net) + 1):
        torch.testing.assert_close(net[cut:](net[:cut](x)), net(x))
        torch.testing.assert_close(compose(net[:cut], x), net[:cut](x))


def test_a_stream_block_rewrites_its_own_channels_only():
    net = make(WIDTHS)
    x = stream(2, 9)
    for block, width in zip(net, (4, 4, 6, 9, 9, 9)):
        y = block(x)
        assert block.width == width and y.shape == x.shape
        torch.testing.assert_close(y[:, :width], block.block(x[:, :width]))
        torch.testing.assert_close(y[:, width:], x[:, width:], rtol=0, atol=0)
    before = x.clone()
    compose(net, x)
    assert torch.equal(x, before)


def test_the_block_of_a_nested_container_is_the_module():
    net, flat = nested_steps()
    assert [block.block for block in net] == [block.block for block in flat] and [*net] == [*net]
    z = stream(2, 9)
    torch.testing.assert_close(nn.Sequential(net[0].block)(z[:, :4]), net[0](z)[:, :4])


def test_a_stream_block_passes_arguments_and_attributes_on():
    net = make(WIDTHS)
    x = stream(2, 9)
    assert torch.equal(net[0](x, scale=0.0), x)
    assert net[0].fc is net.networks[0][0].fc and net[0].dim == -1
    net[0].dim = -2
    assert net.networks[0][0].dim == -2 and torch.equal(net[1](x)[:, 4:], x[:, 4:])
    net[0].dim = -1
    assert torch.equal(copy.deepcopy(net[0])(x), net[0](x)) and not hasattr(net[0], "nothing")
    net[0].fc = nn.Identity()
    assert type(net.networks[0][0].fc) is nn.Identity and not torch.equal(net[0](x), make(WIDTHS)[0](x))


# ---- a sequence


class Halved(nn.Module):
    """A wrapper as users write it, around a block as it finds it in a model."""

    def __init__(self, block):
        super().__init__()
        self.block, self.scale = block, nn.Parameter(torch.tensor(0.5))

    def forward(self, x, *args):
        return x + self.scale * (self.block(x, *args) - x)


@pytest.mark.parametrize(
    "build",
    [*COMPOSED.values(), lambda: StepSequence([Block(w) for w in (9, 4, 4, 6, 9)], WIDTHS, (2, 1, 1), lead=1)],
    ids=[*COMPOSED, "stepified"],
)
def test_a_wrapper_takes_a_blocks_place(build):
    net, x = build(), stream(2, 5, 9)
    reference = copy.deepcopy(net)
    for i, block in enumerate(net):
        net[i] = Halved(block)
    assert len(net) == len(reference)
    expected = x
    for block in reference:
        expected = expected + 0.5 * (block(expected) - expected)
    torch.testing.assert_close(net(x), expected)
    names = {name for name, _ in net.named_parameters()}
    assert sum(name.endswith(".scale") for name in names) == len(net)  # and the blocks' own parameters are kept
    assert {name.replace(".block.", ".") for name in names if "scale" not in name} == reference.state_dict().keys()
    net[-1] = nn.Sequential(net[-1].block, nn.Identity())
    assert len(net) == len(reference)
    net[-1] = nn.Identity()
    assert torch.equal(net[:-1](x), net(x)) and type(net[-1].block) is nn.Identity


def test_what_cannot_take_a_blocks_place():
    net = make(WIDTHS)
    for index, module, error, message in [
        (0, "fc", TypeError, "block 0: got str, expected an nn.Module, such as blocks.i..block"),
        (6, Block(9), IndexError, "index out of range"),
        (slice(2), Block(4), TypeError, "integer"),
    ]:
        with pytest.raises(error, match=message):
            net[index] = module
    joined = StepSequence(blocks(8, 2), (8,), (2,))
    for container in (connect(blocks(8, 2), "lambdas", width=8), connect(joined, "lambdas")):
        with pytest.raises(TypeError, match="got a replacement for a block that a design has joined"):
            container[0] = Halved(container[0])


@EVERY_PROFILE
def test_length_and_indices(widths):
    net = make(widths)
    flat = [block for network in net.networks for block in network]
    assert len(net) == len(list(net)) == len(flat) and net.blocks_per_step() == list(DEPTHS[: len(widths)])
    assert [stream_block.block for stream_block in net] == flat
    assert [net[i].block for i in range(-len(net), len(net))] == flat + flat
    assert [stream_block.width for stream_block in net] == [w for w, d in zip(widths, DEPTHS) for _ in range(d)]
    for index in (len(net), -len(net) - 1):
        with pytest.raises(IndexError):
            net[index]


SLICES = [slice(None), slice(3), slice(1, 4), slice(-2, None), slice(None, None, 2), slice(2, 2), slice(0, 99)]


@pytest.mark.parametrize("index", SLICES, ids=str)
@pytest.mark.parametrize("design, widths", [(StepsNet, WIDTHS), (ReverseStepsNet, WIDTHS[::-1])])
def test_a_slice_holds_the_same_modules_under_the_same_names(design, widths, index):
    net = make(widths, dim=1, design=design)
    part = net[index]
    kept = dict(list(net.named_parameters())[2 * i + j] for i in range(6)[index] for j in range(2))
    assert type(part) is design and part.widths == net.widths and part.dim == net.dim
    assert len(part) == len(range(6)[index])
    assert part.state_dict().keys() == kept.keys()
    assert all(dict(part.named_parameters())[name] is parameter for name, parameter in kept.items())


def test_a_slice_keeps_blocks_that_repeat():
    shared = nn.Linear(4, 4)
    container = StepsNet([nn.Sequential(shared, shared, shared), nn.Sequential(nn.Linear(6, 6))], widths=(4, 6))
    x = torch.randn(2, 6)
    assert len(container[:]) == len(container) == 4 and len(container[:2]) == 2
    assert torch.equal(container[:](x), container(x))


def test_a_slice_keeps_training_mode_and_checkpointing():
    net = make(WIDTHS).eval()
    net.set_grad_checkpointing()
    assert not net[:3].training and net[:3].grad_checkpointing
    assert net.train()[:3].training


class Doubled(nn.Sequential):
    """More than its parts."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_sequence_with_a_forward_pass_of_its_own_is_one_block(checkpointed):
    net = StepsNet([Doubled(nn.Linear(4, 4)), nn.Linear(6, 6)], [4, 6])
    net.set_grad_checkpointing(checkpointed)
    x = torch.randn(3, 6)
    assert len(net) == 2
    for found in (net(x), net[1](net[0](x)), net[1:](net[:1](x))):
        torch.testing.assert_close(found, net.networks[1](torch.cat([2 * net.networks[0][0](x[:, :4]), x[:, 4:]], 1)))


def test_blocks_against_the_order_of_execution_are_refused():
    said = "slice: got a step of -1, expected a positive one: blocks keep their order"
    for net in (StepsNet([nn.Linear(4, 4)], [4]), StepSequence([nn.Linear(4, 4), nn.Linear(6, 6)], [4, 6], [1, 1])):
        with pytest.raises(ValueError, match=said):
            net[::-1]


def test_blocks_of_nested_steps_have_the_widths_that_they_read():
    inner = StepsNet([nn.Linear(4, 4), nn.Linear(6, 6)], [4, 6])
    assert widths_of(StepsNet([inner, nn.Linear(8, 8)], [6, 8])) == [4, 6, 8]


def test_a_slice_of_single_modules():
    net = StepsNet([Block(4), Block(6), Block(9)], WIDTHS)
    x = stream(2, 9)
    part = net[1:2]
    assert len(part) == 1
    torch.testing.assert_close(part(x), torch.cat([net.networks[1](x[:, :6]), x[:, 6:]], 1))


# ---- its cost


class Operations(TorchDispatchMode):
    """The ATen operations inside the context, by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dim", [-1, 1])
@pytest.mark.parametrize("build", [nn.Identity, lambda: nn.Sequential(*[nn.Identity()] * 4)])
@pytest.mark.parametrize(
    "widths, splits, concatenations",
    [
        *((tuple(range(2, 2 + n)), min(n - 1, 1), n - 1) for n in (1, 2, 3, 5)),
        ((6, 5, 3, 2), 3, 1),
        ((6, 6, 6), 0, 0),
        ((9, 6, 4, 6, 9), 2, 2),
        ((9, 4, 4, 9), 1, 1),
        ((6, 9, 4), 2, 2),
    ],
    ids=str,
)
def test_splits_and_concatenations_do_not_depend_on_the_number_of_blocks(widths, splits, concatenations, dim, build):
    x = torch.zeros(1, max(widths), max(widths))
    with Operations() as found:
        StepsNet([build() for _ in widths], widths, dim)(x)
    assert found.names == +Counter(split_with_sizes=splits, cat=concatenations)


def test_nothing_but_what_is_taken_back_is_copied():
    """A bow-tie's concatenation is as wide as the next network, not as the stream."""
    widths = (9, 4, 6, 9)
    net = StepsNet([nn.Identity() for _ in widths], widths)
    sizes = []

    class Concatenations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ == "cat":
                sizes.append(output.shape[-1])
            return output

    with Concatenations():
        net(stream(2, 9))
    assert sizes == [6, 9]


# ---- errors


@pytest.mark.parametrize(
    "widths, message",
    [
        ((4,), r"networks: got 2, expected one per width of \(4,\)"),
        ((4, 6, 9), r"networks: got 2, expected one per width of \(4, 6, 9\)"),
        ((), r"widths: got \(\), expected positive integers"),
        ((0, 6), r"widths: got \(0, 6\), expected positive integers"),
        ((4, -6), r"widths: got \(4, -6\), expected positive integers"),
        ((4.0, 6), r"widths: got \(4\.0, 6\), expected positive integers"),
        (("4", 6), r"widths: got \('4', 6\), expected positive integers"),
        ((True, 6), r"widths: got \(True, 6\), expected positive integers"),
    ],
)
def test_wrong_widths(widths, message):
    for design in (StepsNet, ReverseStepsNet):
        with pytest.raises(ValueError, match=message):
            design([nn.Identity(), nn.Identity()], widths)


@pytest.mark.parametrize("widths", [(4, 6), (6, 6), (9, 4, 6)])
def test_reverse_expects_decreasing_widths(widths):
    with pytest.raises(ValueError, match=r"widths: got .*, expected strictly decreasing widths"):
        ReverseStepsNet([nn.Identity() for _ in widths], widths)


def test_a_network_that_is_not_a_module():
    with pytest.raises(TypeError, match=r"network 1: got Module, expected an nn\.Module that can be called"):
        StepsNet([nn.Module()], (4,))
    with pytest.raises(TypeError, match=r"network 2: got function, expected an nn\.Module"):
        StepsNet([nn.Identity(), lambda x: x], (4, 6))
    said = r"network 1: got ModuleList, expected an nn\.Module that can be called, such as nn\.Sequential"
    with pytest.raises(TypeError, match=said):
        StepsNet([nn.ModuleList([nn.Identity()]), nn.Identity()], (4, 6))


@EVERY_PROFILE
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_network_that_changes_its_width(widths, checkpointed):
    for step, width in enumerate(widths, 1):
        networks = [nn.Identity() for _ in widths]
        networks[step - 1] = nn.Linear(width, width + 7)
        net = StepsNet(networks, widths)
        net.set_grad_checkpointing(checkpointed)
        expected = f"output of step {step} of the StepsNet: got {width + 7} channels, expected {width}"
        with pytest.raises(ValueError, match=expected):
            net(stream(2, 9))


@pytest.mark.parametrize("got", [1, 8, 10])
@pytest.mark.parametrize("dim", [-1, 1])
@pytest.mark.parametrize("widths", [*PROFILES.values(), (9,)])
def test_an_input_of_another_width(widths, dim, got):
    with pytest.raises(ValueError, match=f"input of the blocks: got {got} channels, expected 9"):
        make(widths, dim=dim)(stream(2, *((got, 9) if dim == 1 else (9, got))))


def test_adjacent_widths_add_up():
    net = make(WIDTHS)
    assert net.slice_widths == [WIDTHS[0], *(wide - narrow for narrow, wide in pairwise(WIDTHS))]
    assert sum(net.slice_widths) == net.width and net.slices_read == [1, 2, 3]


def test_a_network_that_returns_a_tuple_is_refused():
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), None

    with pytest.raises(TypeError, match=r"^output of step 1 of the StepsNet: got tuple, expected one tensor$"):
        StepsNet([Pair(4, 4), nn.Linear(6, 6)], widths=(4, 6))(torch.randn(2, 6))
