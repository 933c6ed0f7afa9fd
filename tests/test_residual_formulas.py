"""Every design against its formula, written out here with tensors in place of modules.

Against other libraries: test_residual_parity.py.
The start values of LayerScale, ReZero, DeepNorm, Fixup and NormFormer are in test_residual_starts.py.
"""

import math

import pytest
import torch
from residual_networks import JOINED, OPTIONS, WIDTH, stirred
from timm.models.vision_transformer import Block
from torch.nn import functional as F

import stepsnet.residual
from stepsnet.residual import SourceSum, source_sum

DEPTH = 5
X = torch.randn(2, 3, WIDTH, dtype=torch.double, generator=torch.Generator().manual_seed(3))


def norm(layer, x):
    return F.layer_norm(x, layer.weight.shape, layer.weight, layer.bias, layer.eps)


def attention(block, x, values=None, inner=lambda heads: heads):
    """The attention of a timm block; ``values`` are told to, and may change, V. x: one input, or of q, k and v.

    ``inner`` changes what the projection reads, here and in ``mlp``.
    """
    inputs = x if isinstance(x, tuple) else (x, x, x)
    B, N, C = inputs[0].shape
    bias = 0 if block.attn.qkv.bias is None else block.attn.qkv.bias
    weights, biases = block.attn.qkv.weight.split(C), (bias + X.new_zeros(3 * C)).split(C)
    q, k, v = (one @ weight.T + shift for one, weight, shift in zip(inputs, weights, biases))
    v = v if values is None else values(v)
    q, k, v = (part.reshape(B, N, 2, C // 2).transpose(1, 2) for part in (q, k, v))
    heads = (q @ k.transpose(-2, -1) / math.sqrt(C // 2)).softmax(-1) @ v
    return F.linear(inner(heads.transpose(1, 2).reshape(B, N, C)), block.attn.proj.weight, block.attn.proj.bias)


def mlp(block, x, inner=lambda hidden: hidden):
    hidden = F.gelu(F.linear(x, block.mlp.fc1.weight, block.mlp.fc1.bias))
    return F.linear(inner(hidden), block.mlp.fc2.weight, block.mlp.fc2.bias)


def branches(block):
    return [lambda x: attention(block, norm(block.norm1, x)), lambda x: mlp(block, norm(block.norm2, x))]


def layers(network):
    """(F, connection) of each branch in order."""
    return [pair for block in network.blocks for pair in zip(branches(block), block.connections)]


def whole(block, x):
    for branch in branches(block):
        x = x + branch(x)
    return x


def layer_scale(network, x):
    for branch, one in layers(network):
        x = x + torch.diag(one.gain).matmul(branch(x).unsqueeze(-1)).squeeze(-1)
    return x


def rezero(network, x):
    for block in network.blocks:
        x = x + block.connections[0].alpha.gain * attention(block, x)
        x = x + block.connections[1].alpha.gain * mlp(block, x)
    return x


def deepnorm(network, x):
    alpha = (2 * DEPTH) ** 0.25
    for block in network.blocks:
        one, two = block.connections
        x = norm(one.norm, alpha * x + attention(block, x))
        x = norm(two.norm, alpha * x + mlp(block, x))
    return x


def fixup(network, x):
    for block in network.blocks:
        one, two = block.connections
        x = x + one.gain.gain * attention(block, x + one.shift.shift, inner=lambda h, one=one: h + one.inner.shift)
        x = x + two.gain.gain * mlp(block, x + two.shift.shift, inner=lambda h, two=two: h + two.inner.shift)
    return x


def normformer(network, x):
    for block in network.blocks:
        one, two = block.connections
        gains = one.inner.gain.repeat_interleave(WIDTH // 2)
        x = x + norm(one.norm, attention(block, norm(block.norm1, x), inner=lambda h, gains=gains: h * gains))
        x = x + mlp(block, norm(block.norm2, x), inner=lambda h, two=two: norm(two.inner, h))
    return x


def layer_norm_scaling(network, x):
    for number, block in enumerate(network.blocks, 1):
        x = x + attention(block, norm(block.norm1, x) / math.sqrt(number))
        x = x + mlp(block, norm(block.norm2, x) / math.sqrt(number))
    return x


def peri_ln(network, x):
    for branch, one in layers(network):
        x = x + norm(one.norm, branch(x))
    return x


def complete_p(network, x, base_blocks=1):
    for branch, _ in layers(network):
        x = x + branch(x) * base_blocks / DEPTH
    return x


def value_residual(network, x):
    first = []
    for block in network.blocks:

        def mixed(v, one=block.connections[0]):
            first.append(v)
            return v if len(first) == 1 else one.mix[0] * first[0] + one.mix[1] * v

        x = x + attention(block, norm(block.norm1, x), mixed)
        x = x + mlp(block, norm(block.norm2, x))
    return x


def lambdas(network, x):
    x_0 = x
    for block in network.blocks:
        mix = block.connections[0].mix
        x = whole(block, mix[0] * x + (mix[1] * x_0 if len(mix) == 2 else 0))
    return x


def dense_former(network, x):
    X, Y = [x], x
    for i, block in enumerate(network.blocks, 1):
        X.append(whole(block, Y))
        Y = torch.einsum("j,jbnc->bnc", block.connections[0].alpha, torch.stack(X))
        assert len(X) == i + 1
    return Y


def grn(one, way, G):
    """GRN-v3 of sources G, (t, B, N, C)."""
    b, w = one.b.reshape(len(G), one.outputs, WIDTH)[:, way], one.w[:, way]
    return torch.einsum("tbnc,tbnc->bnc", G, b[:, None, None] + (G @ w).relu()[..., None])


def deep_cross_attention(network, x):
    G = [x]
    for block in network.blocks:
        q, k, v = (grn(block.connections[0].grn, way, torch.stack(G)) for way in range(3))
        attended = attention(block, tuple(norm(block.norm1, one) for one in (q, k, v)))
        G.append(attended + mlp(block, norm(block.norm2, q + attended)))
    return grn(network.wiring.grn, 0, torch.stack(G))


def mudd(network, x):
    X, Q, K, V, R = [x], x, x, x, x
    for i, block in enumerate(network.blocks, 1):
        one = block.connections[0]
        x = R + attention(block, tuple(norm(block.norm1, way) for way in (Q, K, V)))
        X.append(x + mlp(block, norm(block.norm2, x)))
        hidden = F.gelu(X[i] / (X[i].square().mean(-1, keepdim=True) + 1e-6).sqrt() @ one.W_1)
        assert hidden.shape[-1] == 4 * (i + 1)
        A = (hidden @ one.W_2 + one.a).unflatten(-1, (-1, i + 1))
        *QKV, R = torch.einsum("bncj,jbnd->cbnd", A, torch.stack(X))
        Q, K, V = QKV or (None, None, None)
    assert i == DEPTH and Q is None
    return R


def laurel(network, x):
    for branch, one in layers(network):
        x = branch(x) + torch.einsum("cr,rd,bnd->bnc", one.A, one.B, x) + x
    return x


def alt_up(network, x, streams=2):
    x = [x] * streams
    for number, block in enumerate(network.blocks):
        one, active = block.connections[0], number % streams
        p = one.p.reshape(streams, streams)
        predicted = [sum(p[i, j] * x[j] for j in range(streams)) for i in range(streams)]
        computed = whole(block, x[active])
        x = [predicted[i] + one.g[i] * (computed - predicted[active]) for i in range(streams)]
    return sum(x) / streams


def hyper_connections(network, x, dynamic=True):
    H = torch.stack([x] * 4)  # (n, B, N, C)
    for branch, one in layers(network):
        # (n, B, N), (n, B, N, n) and (n, B, N), where 1 stands for B and N without the dynamic part
        A_m, A_r, B = one.A_m[:, None, None], one.A_r.reshape(4, 4)[:, None, None], one.B[:, None, None]
        if dynamic:
            normed = F.layer_norm(H, (WIDTH,))
            A_m = one.s[0] * torch.tanh(normed @ one.W[:, 0]) + A_m
            A_r = one.s[0] * torch.tanh(normed @ one.W[:, 1:5]) + A_r
            B = one.s[1] * torch.tanh(normed @ one.W[:, 5]) + B
        out = branch(torch.einsum("ibn,ibnc->bnc", A_m, H))
        H = torch.einsum("ibnj,ibnc->jbnc", A_r, H) + B[..., None] * out
    return H.mean(0)


def mhc(network, x):
    x = torch.stack([x] * 4, -2)
    for branch, one in layers(network):
        flat = x.flatten(-2)
        flat = flat / (flat.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        pre, post, res = (flat @ one.phi).split([4, 4, 16], -1)
        b_pre, b_post, b_res = one.b.split([4, 4, 16])
        H_pre = 1 / (1 + torch.exp(-(one.alpha[0] * pre + b_pre)))
        H_post = 2 / (1 + torch.exp(-(one.alpha[1] * post + b_post)))
        M = torch.exp(one.alpha[2] * res + b_res).reshape(*res.shape[:-1], 4, 4)
        for _ in range(20):
            M = M / M.sum(-2, keepdim=True)
            M = M / M.sum(-1, keepdim=True)
        out = branch(torch.einsum("bni,bnic->bnc", H_pre, x))
        x = torch.einsum("bnij,bnjc->bnic", M, x) + torch.einsum("bni,bnc->bnic", H_post, out)
    return x.mean(-2)


def attended(w, sources):
    V = torch.stack(sources)  # (sources, B, N, C)
    K = V / (V.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return torch.einsum("sbn,sbnc->bnc", torch.einsum("c,sbnc->sbn", w, K).softmax(0), V)


def attention_residuals(network, x):
    v = [x]
    for branch, one in layers(network):
        v.append(branch(attended(one.query.w, v) if len(v) > 1 else x))
    return attended(network.wiring.query.w, v)


def attention_residuals_block(network, x):
    """10 layers in 3 groups: of 4, 4 and 2."""
    sums, partial = [x], None
    for number, (branch, one) in enumerate(layers(network)):
        if number in (4, 8):
            sums, partial = [*sums, partial], None
        sources = sums if partial is None else [*sums, partial]
        out = branch(attended(one.query.w, sources) if number else x)
        partial = out if partial is None else partial + out
    return attended(network.wiring.query.w, [*sums, partial])


def connected(name, **options):
    blocks = [Block(WIDTH, 2, qkv_bias=True) for _ in range(DEPTH)]
    return stirred(stepsnet.residual.connect(blocks, name, **OPTIONS.get(name, options)), 0.2).double().eval()


def assert_equal(network, expected):
    """The output is the expected one, and so are the gradients."""
    assert expected.std() > 0.03
    parameters = list(network.parameters())
    right = torch.autograd.grad(expected.square().sum(), parameters, allow_unused=True)
    output = network(X)
    torch.testing.assert_close(output, expected)
    found = torch.autograd.grad(output.square().sum(), parameters, allow_unused=True)
    of_zero = [torch.zeros_like(parameter) for parameter in parameters]
    of_all = [[zero if g is None else g for g, zero in zip(gradients, of_zero)] for gradients in (found, right)]
    torch.testing.assert_close(*of_all, rtol=1e-6, atol=1e-6)


OTHER_OPTIONS = [
    ("complete_p", {"base_blocks": 3}),
    ("hyper_connections", {"dynamic": False}),
    ("alt_up", {"streams": 3}),
]


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in JOINED), *OTHER_OPTIONS])
def test_a_design_is_its_formula(name, options):
    network = connected(name, **options)
    assert_equal(network, globals()[name](network, X, **options))


@pytest.mark.parametrize("scale", [1, 100])  # 100: weights far apart
@pytest.mark.parametrize(
    "name", ["dense_former", "deep_cross_attention", "mudd", "attention_residuals", "attention_residuals_block"]
)
def test_sums_that_take_two_sources_at_a_time(name, scale, monkeypatch):
    """As compiled sums take nine, here without compilation."""
    taken = []
    monkeypatch.setattr(source_sum, "AT_ONCE", 2)
    monkeypatch.setattr(SourceSum, "compiled", lambda self, add, sources, *_: taken.append(len(sources)) or add)
    network = connected(name)
    with torch.no_grad():
        for key, weight in network.named_parameters():
            if key.endswith("query.w"):
                weight.mul_(scale)
    assert_equal(network, globals()[name](network, X))
    assert set(taken) == {1, 2}


@pytest.mark.parametrize(("dilation", "period"), [(2, 1), (1, 2), (3, 2)])
def test_dense_former_with_dilation_and_period(dilation, period):
    blocks = [Block(WIDTH, 2) for _ in range(6)]
    network = stepsnet.residual.connect(blocks, "dense_former", dilation=dilation, period=period)
    network = stirred(network, 0.2).double().eval()
    X_, Y = [X], X
    for i, block in enumerate(network.blocks, 1):
        X_.append(whole(block, Y))
        chosen = [j for j in range(i + 1) if j % dilation == i % dilation]
        alpha = block.connections[0].alpha
        Y = X_[-1] if i % period else sum(a * X_[j] for a, j in zip(alpha, chosen))
        assert (alpha is None) == bool(i % period)
    torch.testing.assert_close(network(X), Y)


def test_the_low_rank_map_starts_with_orthogonal_rows():
    """Sec. 3.3 of 2411.07501, whose A is our B transposed: 1/√(rD) where i mod r = j."""
    one = stepsnet.residual.connect([Block(10, 2)], "laurel", rank=4)[0].block.connections[0]
    expected = torch.tensor([[(i % 4 == j) / math.sqrt(4 * 10) for i in range(10)] for j in range(4)])
    torch.testing.assert_close(one.B.detach(), expected)
    assert not one.A.any()


@pytest.mark.parametrize("depth", [2, 5])
def test_deep_cross_attention_with_the_last_two(depth):
    blocks = [Block(WIDTH, 2, qkv_bias=True) for _ in range(depth)]
    network = stirred(stepsnet.residual.connect(blocks, "deep_cross_attention", last=2), 0.1).double().eval()
    x, added = X, []
    for block in [*network.blocks, None]:
        one = network.wiring.grn if block is None else block.connections[0].grn
        between = [sum(added[:-2])] if len(added) > 2 else []
        G = torch.stack([x, *between, *added[-2:]])
        if block is None:
            break
        q, k, v = (grn(one, way, G) for way in range(3))
        attended = attention(block, tuple(norm(block.norm1, part) for part in (q, k, v)))
        added.append(attended + mlp(block, norm(block.norm2, q + attended)))
    torch.testing.assert_close(network(X), grn(one, 0, G))


def test_mudd_with_norms_around_the_sums():
    blocks = [Block(WIDTH, 2, qkv_bias=True) for _ in range(3)]
    network = stepsnet.residual.connect(blocks, "mudd", prepost_norm=True).double().eval()
    plain = X
    for block in blocks:
        plain = whole(block, plain)
    torch.testing.assert_close(network(X), plain)  # its start
    stirred(network, 0.2)

    def rms(x, weight):
        return F.rms_norm(x, (WIDTH,), weight, 1e-6)

    Q = K = V = R = X
    normed = [rms(X, network.wiring.pre.weight)]
    for block in network.blocks:
        one = block.connections[0]
        x = R + attention(block, tuple(norm(block.norm1, way) for way in (Q, K, V)))
        x = x + mlp(block, norm(block.norm2, x))
        normed.append(rms(x, one.pre.weight))
        A = F.gelu(rms(x, None) @ one.W_1) @ one.W_2 + one.a
        ways = [
            x + rms(torch.einsum("bnj,jbnc->bnc", a, torch.stack(normed)), n.weight)
            for a, n in zip(A.split(len(normed), -1), one.post)
        ]
        Q, K, V, R = ways if len(ways) == 4 else (None, None, None, *ways)
    torch.testing.assert_close(network(X), R)
