"""Small StepsNets for the tests of the container."""

import torch
from torch import nn

from stepsnet import ReverseStepsNet, StepsNet

WIDTHS = (4, 6, 9)
DEPTHS = (2, 1, 3, 1)
# (6, 9, 4) begins with a split, widens, narrows, and ends with a concatenation
PROFILES = {"steps": WIDTHS, "reverse": WIDTHS[::-1], "bow-tie": (9, 4, 6, 9), "any": (6, 9, 4)}


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


def make(widths, depths=DEPTHS, dim=-1, design=StepsNet):
    torch.manual_seed(0)
    return design([blocks(width, depth, dim) for width, depth in zip(widths, depths)], widths, dim)


def nested_steps():
    """A 2-step network inside a step, and the same three networks in a row."""
    torch.manual_seed(0)
    f1, f2, f3 = blocks(4, 2), blocks(6, 1), blocks(9, 2)
    return StepsNet([StepsNet([f1, f2], (4, 6)), f3], (6, 9)), StepsNet([f1, f2, f3], WIDTHS)


def steps_inside_reverse():
    torch.manual_seed(0)
    return ReverseStepsNet([blocks(9, 1), make((4, 6), (2, 1)), blocks(3, 1)], (9, 6, 3))


def stream(*shape, dtype=torch.float32, requires_grad=False):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(requires_grad)


def write_out(networks, widths, z, dim=-1):
    """The rule, with a copy of the whole stream per network: F_i rewrites the first C_i channels."""
    for network, width in zip(networks, widths):
        read, waiting = z.split([width, z.shape[dim] - width], dim)
        z = torch.cat([network(read), waiting], dim)
    return z


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
