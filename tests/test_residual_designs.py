"""What has to hold for every design of the residual stream: its start, its signal, its gradients, its use in steps."""

import copy
import math
import pickle
from functools import partial

import pytest
import timm
import torch
from residual_networks import JOINED, OPTIONS, STEPS, WIDTH, deit, stirred, train
from timm.models import checkpoint_seq
from timm.models.vision_transformer import Block
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import stepsnet.residual
from stepsnet.analysis.interventions import dropped
from stepsnet.analysis.residual_stream import measure_stream
from stepsnet.errors import UserError
from stepsnet.models.blocks import blocks_of, recompute_blocks
from stepsnet.models.build import build_model
from stepsnet.models.compilation import compile_blocks
from stepsnet.residual import DESIGNS, Connection, Wiring
from stepsnet.residual.design import DesignPart
from stepsnet.residual.mhc import sinkhorn_knopp
from stepsnet.settings.config import ModelSpec
from stepsnet.stream import recomputed

DRAWN = ("phi", "W_1")  # start values at random
EVERY = pytest.mark.parametrize("name", DESIGNS)
IMAGES, LABELS = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(7)), torch.arange(8) % 5


@EVERY
def test_the_start_is_the_plain_network_where_the_design_says_so(name):
    ours, plain = deit(name, depths=(6,)).eval(), stirred(deit("plain", depths=(6,)), 0.1).eval()
    ours.load_state_dict(_of_connected(ours, plain), strict=False)
    got, expected = ours(IMAGES), plain(IMAGES)
    if name == "plain":
        assert torch.equal(got, expected)
    elif DESIGNS[name].starts_as_plain:
        # the ε of the norms sees the smaller stream of the Attention Residuals
        assert (got - expected).abs().max() < (1e-3 if "attention" in name else 1e-5) * expected.abs().max()
    elif name == "mhc":  # its paper gives no start for b and φ; ours is nearly that
        assert 0 < (got - expected).abs().max() < 0.02 * expected.abs().max()
    else:
        assert (got - expected).abs().max() > 0.002 * expected.abs().max()


def _of_connected(ours, plain):
    """The plain network's weights by the names that they have in ours, which keeps the blocks in the same place."""
    kept = plain.state_dict()
    assert sum(key in kept for key in ours.state_dict()) >= len(kept) - 24  # the norms, where they go or move
    return {key: value for key, value in kept.items() if key in ours.state_dict()}


def stepified_swin(design):
    args = dict(img_size=64, embed_dim=16, depths=(1, 1, 3, 1), num_heads=(1, 1, 2, 2), num_classes=7)
    return stepsnet.stepify(timm.create_model("swin_tiny_patch4_window7_224", **args), 2, residual=design)


def language_model(design):
    shape = dict(vocab_size=40, widths=(16, 24), depths=(3, 2), num_attention_heads=(2, 2), max_position_embeddings=32)
    return build_model(ModelSpec("steps_transformer", {**shape, "residual": design}))


@pytest.mark.parametrize(
    "make", [partial(deit, **STEPS), stepified_swin, language_model], ids=["deit", "swin", "llama"]
)
def test_blocks_are_numbered_through_all_steps_and_stages(make):
    """By the place that is told to each connection, of which a block has two."""
    model = make("layer_scale")
    blocks = len(blocks_of(model))
    places = [(part.place.block, part.place.blocks) for part in model.modules() if isinstance(part, Connection)]
    assert blocks >= 5 and places == [(number, blocks) for number in range(1, blocks + 1) for _ in range(2)]


@EVERY
def test_a_silent_network_passes_its_stream_on_through_100_blocks(name):
    """With all branches at zero. Attention Residuals average what they read, as their formula has it."""
    model = deit(name, depths=(100,)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if ".attn.proj." in key or ".mlp.fc2." in key:
                parameter.zero_()
    x = torch.randn(2, 3, WIDTH)
    # the mean of the start and of 200 outputs, or of 3 sums of groups
    expected = {"attention_residuals": 1 / 201, "attention_residuals_block": 1 / 4}.get(name, 1.0)
    ratio = (model.blocks(x).square().mean() / x.square().mean()).sqrt().item()
    assert expected / 2 < ratio < expected * 2
    if expected != 1.0:
        assert ratio == pytest.approx(expected, rel=1e-3)


@EVERY
@pytest.mark.parametrize("depth", [6, 40])
def test_gradients_reach_the_first_and_the_last_block_and_every_parameter(name, depth):
    model = deit(name, depths=(depth,), **({"qkv_bias": False} if depth == 6 else {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reached = set()
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(IMAGES), LABELS).backward()
        reached |= {key for key, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    assert {key for key, _ in model.named_parameters()} - reached == set()


@EVERY
def test_a_step_without_blocks_has_nothing_to_train(name):
    model = deit(name, widths=(24, 48), depths=(2, 0), num_heads=(3, 6))
    model(IMAGES).square().sum().backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []


@EVERY
def test_it_trains_in_steps_and_recomputed_blocks_have_the_same_gradients(name):
    model = deit(name, **STEPS)
    losses = train(model, IMAGES, LABELS, updates=40)
    assert losses[-1] < 0.75 * losses[0]

    def gradients(network):
        network.zero_grad()
        F.cross_entropy(network(IMAGES), LABELS).backward()
        return [parameter.grad.clone() for parameter in network.parameters()]

    expected, copied = gradients(model), copy.deepcopy(model)
    model.set_grad_checkpointing()
    recompute_blocks(blocks_of(copied))
    for network in (model, copied):
        torch.testing.assert_close(gradients(network), expected, rtol=0, atol=0)


@EVERY
def test_its_stream_is_measured_and_shown_block_by_block(name):
    model = stirred(deit(name, **STEPS), 0.1).eval()
    measured = measure_stream(model, lambda m: F.cross_entropy(m(IMAGES), LABELS))
    assert [block.width for block in measured] == [16, 16, 24, 32, 32]
    assert all(math.isfinite(v) and v > 0 for block in measured for v in (block.gamma, block.branch, block.gradient))
    if name != "plain" and DESIGNS[name].starts_as_plain:  # then what is measured is what plain has, too
        ours, plain = deit(name, depths=(6,)).eval(), stirred(deit("plain", depths=(6,)), 0.1).eval()
        ours.load_state_dict(_of_connected(ours, plain), strict=False)
        for one, other in zip(
            *(measure_stream(m, lambda m: F.cross_entropy(m(IMAGES), LABELS)) for m in (ours, plain))
        ):
            for key in ("gamma", "gamma_read", "branch", "correlation"):
                assert getattr(one, key) == pytest.approx(getattr(other, key), rel=1e-2), key
            if not DESIGNS[name].wiring.grows:  # else the gradient is that of one of several tensors
                assert one.gradient == pytest.approx(other.gradient, rel=1e-2)
    states = model.forward_intermediates(IMAGES, intermediates_only=True, output_fmt="NLC", norm=True)
    assert len(states) == len(model.blocks) == 5
    torch.testing.assert_close(states[-1], model.forward_features(IMAGES))
    x = model.patch_embed(IMAGES) + model.pos_embed
    torch.testing.assert_close(model.norm(model.blocks[:3](x)), states[2])


@EVERY
def test_it_begins_again_on_the_meta_device(name):
    eager = deit(name, **STEPS).eval()
    with torch.device("meta"):
        model = deit(name, **STEPS)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    starts = {key: value for key, value in eager.state_dict().items() if "connections" in key or ".wiring." in key}
    for key, value in starts.items():
        if not key.endswith((".phi", ".W_1")):  # which start at random
            assert torch.equal(model.state_dict()[key], value), key
    model.load_state_dict(eager.state_dict())
    torch.testing.assert_close(model.eval()(IMAGES), eager(IMAGES))
    with torch.device("meta"):  # a state dict alone, which lacks what is not saved
        empty = deit(name, **STEPS)
    empty.to_empty(device="cpu").load_state_dict(eager.state_dict())
    torch.testing.assert_close(empty.eval()(IMAGES), eager(IMAGES))
    with torch.device("meta"):
        empty = deit(name, **STEPS)
    empty.load_state_dict(eager.state_dict(), assign=True)
    torch.testing.assert_close(empty.eval()(IMAGES), eager(IMAGES))


@EVERY
def test_it_is_exported(name):
    model = stirred(deit(name, **STEPS), 0.1).eval()
    torch.testing.assert_close(torch.export.export(model, (IMAGES,)).module()(IMAGES), model(IMAGES))


# one of each kind: hooks, state of one shape, state that grows, a block as a whole, its branches together
@pytest.mark.parametrize(
    "name",
    ["layer_norm_scaling", "value_residual", "dense_former", "mudd", "alt_up", "mhc", "attention_residuals_block"],
)
def test_blocks_share_their_compiled_graphs(name):
    model = stirred(deit(name, depths=(12,)), 0.1).eval()
    expected = model(IMAGES)
    torch._dynamo.reset()
    counters.clear()
    compile_blocks(model, backend="eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=4):
        torch.testing.assert_close(model(IMAGES), expected)
    assert not counters["graph_break"]  # behind one, what is compiled may hold on to an object of one pass


class _Loop(torch.nn.Module):
    """A model with a loop of its own, which a break may cut into several graphs."""

    def __init__(self, blocks, breaks):
        super().__init__()
        self.blocks, self.breaks = blocks, breaks

    def forward(self, x):
        for block in self.blocks[: len(self.blocks)]:  # a slice, as in models of transformers
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x


# one of each wiring: the stream, several streams, all outputs, the first values, sources of a mean
@pytest.mark.parametrize(
    ("name", "breaks"),
    [
        ("layer_scale", False),
        ("mhc", False),
        ("dense_former", False),
        ("value_residual", False),
        ("attention_residuals", False),
        ("dense_former", True),
    ],
)
def test_a_model_that_loops_over_its_blocks_is_compiled(name, breaks):
    model = _Loop(stirred(stepsnet.residual.connect([Block(WIDTH, 2) for _ in range(2)], name), 0.1), breaks)
    x = torch.randn(2, 5, WIDTH)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=not breaks)
    torch.testing.assert_close(compiled(x), model(x))


SUMS = {"dense_former": 10, "mudd": 12, "attention_residuals": 18, "attention_residuals_block": 3}


@pytest.mark.parametrize(("name", "of_sums"), SUMS.items())
def test_sums_over_all_blocks_share_their_compiled_graphs(name, of_sums):
    """One graph for each number of sources up to nine; where there are more, one goes on from a total.

    MUDD's last sums are fewer, and the Attention Residuals weigh up to nine at once otherwise than those that go on.
    """
    for depth in (12, 14):
        model = stirred(deit(name, depths=(depth,)), 0.1)
        expected = torch.autograd.grad(model(IMAGES).sum(), list(model.parameters()))
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compile_blocks(model, backend=counter)
        found = torch.autograd.grad(model(IMAGES).sum(), list(model.parameters()))
        torch.testing.assert_close(found, expected)
        assert counter.frame_count == 2 + of_sums  # attention and MLP have one each
        compile_blocks(model, backend=counter)
        model(IMAGES)
        assert counter.frame_count == 2 + of_sums
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(torch.autograd.grad(other(IMAGES).sum(), list(other.parameters())), expected)


def test_compiled_sums_are_trained_and_evaluated_at_several_widths_and_sizes_of_batches():
    model = stirred(deit("attention_residuals", widths=(16, 24, WIDTH), depths=(2, 2, 6), num_heads=(2, 2, 2)), 0.1)
    expected = model(IMAGES)
    torch._dynamo.reset()
    compile_blocks(model, backend="eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        torch.testing.assert_close(model(IMAGES), expected)
        with torch.no_grad():
            for count in (8, 7, 1):
                torch.testing.assert_close(model(IMAGES[:count]), expected[:count])


@pytest.fixture
def one_of_two_ranks():
    """The mesh of a group whose other rank is not there."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", JOINED)
def test_start_values_reach_parameters_that_are_sharded(name, one_of_two_ranks):
    """As FSDP asks for them where a model was made without weights: each rank has its part of the whole."""
    for part in [one for one in deit(name, depths=(4,)).modules() if isinstance(one, DesignPart)]:
        torch.manual_seed(0)
        part.init_weights()
        expected = {key: value.detach().clone() for key, value in part.named_parameters(recurse=False)}
        for key, value in expected.items():
            empty = distribute_tensor(torch.full_like(value, 7.0), one_of_two_ranks, [Shard(0)], src_data_rank=None)
            setattr(part, key, torch.nn.Parameter(empty))
        part.init_weights()
        for key, value in expected.items():
            got = getattr(part, key).to_local()
            if key in DRAWN:  # by other numbers on each rank
                assert not (got == 7.0).any()
            else:
                torch.testing.assert_close(got, value.chunk(2)[0])


@pytest.mark.parametrize("name", ("mhc", "dense_former", "layer_scale"))
def test_recomputed_blocks_of_a_loop_take_a_second_backward(name):
    blocks = torch.nn.Sequential(*(Block(WIDTH, 2) for _ in range(3)))
    connected = stepsnet.residual.connect(blocks, name)
    x, parameters = torch.randn(2, 5, WIDTH), list(connected.parameters())
    expected = torch.autograd.grad(connected(x).square().sum(), parameters)
    y = checkpoint_seq(connected, x).square().sum()
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(y, parameters, retain_graph=True), expected)


def test_what_is_changed_between_blocks_is_noticed_in_inference_too():
    connected = stepsnet.residual.connect([Block(WIDTH, 2) for _ in range(2)], "mhc").eval()
    with torch.inference_mode():
        first, second = connected
        y = first(torch.randn(2, 5, WIDTH))
        assert second(y).shape == y.shape
        first, second = connected
        y = first(torch.randn(2, 5, WIDTH))
        y[:, 0] += 1.0
        with pytest.raises(RuntimeError, match="got a tensor other than the one that the previous block returned"):
            second(y)


@pytest.mark.parametrize("name", JOINED)
def test_connect_takes_the_place_of_a_sequential(name):
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(*(Block(WIDTH, 2) for _ in range(4)))
    weights = blocks.state_dict()
    connected = stepsnet.residual.connect(blocks, name, **OPTIONS.get(name, {})).eval()
    x = torch.randn(2, 5, WIDTH)
    assert connected(x).shape == x.shape and len(connected) == 4
    kept = {
        key: value for key, value in connected.state_dict().items() if "connections" not in key and "wiring" not in key
    }
    assert kept.keys() <= weights.keys() and len(weights) - len(kept) in (0, 16)  # norms go, or move
    expected = torch.autograd.grad(connected(x).sum(), list(connected.parameters()))
    for again in (False, True):  # as timm recomputes blocks
        y = x
        for block in connected:
            y = recomputed(block, y) if again else block(y)
        torch.testing.assert_close(y, connected(x))
        torch.testing.assert_close(torch.autograd.grad(y.sum(), list(connected.parameters())), expected)
    first, second = list(connected)[:2]
    y, prompt = first(x), torch.ones(WIDTH)
    if DESIGNS[name].wiring is stepsnet.residual.Wiring:  # the tensor is the whole state
        torch.testing.assert_close(second(y + prompt), connected.blocks[1](y + prompt))
        return
    with pytest.raises(RuntimeError, match="block 1 of a connected sequence: got a tensor other than"):
        second(x)
    with torch.no_grad():
        y += prompt
    with pytest.raises(RuntimeError, match="block 1 of a connected sequence: got a tensor other than"):
        second(y)


@EVERY
def test_a_diverged_stream_stays_nan_block_by_block(name):
    blocks = deit(name, **STEPS).eval().blocks
    x = torch.full((1, 4, WIDTH), math.nan)
    for block in blocks:
        x = block(x)
    assert x.isnan().all()


@pytest.mark.parametrize("name", [name for name in JOINED if name not in ("peri_ln", "deepnorm", "normformer")])
def test_a_dropped_block_is_one_whose_branches_give_zero(name):
    """Where a norm behind a branch makes nothing of zero."""
    blocks = [Block(WIDTH, 2) for _ in range(4)]
    network = stirred(stepsnet.residual.connect(blocks, name, **OPTIONS.get(name, {})), 0.2).eval()
    x = torch.randn(2, 5, WIDTH)
    with dropped(blocks[1:2]):
        without = network(x)
    assert (without - network(x)).abs().max() > 0.01
    for layer in (blocks[1].attn.proj, blocks[1].mlp.fc2):
        torch.nn.init.zeros_(layer.weight), torch.nn.init.zeros_(layer.bias)
    torch.testing.assert_close(without, network(x))


@pytest.mark.parametrize("name", [name for name in JOINED if name != "fixup"])
def test_a_stream_in_bfloat16_under_autocast(name):
    """As where nothing in front of the blocks is in float32, such as learned positions."""
    network = stepsnet.residual.connect([Block(WIDTH, 2) for _ in range(2)], name, **OPTIONS.get(name, {}))
    x = torch.randn(2, 5, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        ours = network(x.bfloat16())
    assert (ours.float() - network(x)).abs().max() < 0.1


@pytest.mark.parametrize("name", JOINED)
def test_blocks_are_not_run_without_those_before_them(name):
    """A part of the network that begins anew would compute something else: only a state that is the stream may."""
    network = stirred(stepsnet.residual.connect([Block(WIDTH, 2) for _ in range(4)], name, **OPTIONS.get(name, {})))
    network, x = network.eval(), torch.randn(2, 5, WIDTH)
    if type(network.wiring) is Wiring:
        torch.testing.assert_close(network[2:](network[:2](x)), network(x))
        torch.testing.assert_close(network[1](network[0](x)), network[:2](x))
        return
    for part in (network[2:], network[:3][1:]):
        for run in (part, lambda x, part=part: [block(x) for block in part]):
            with pytest.raises(UserError, match="got a part of a connected sequence without its first block"):
                run(network[:2](x))
    with pytest.raises(
        RuntimeError, match=r"block 2 of .* no block before it has run .* by its index, blocks.2.; .* iterate"
    ):
        network[2](x)
    assert torch.isfinite(network[:2](x)).all() and torch.isfinite(network[0](x)).all() and len(network[4:]) == 0


def test_an_interrupted_attention_leaves_no_inputs_behind():
    network = stirred(stepsnet.residual.connect([Block(WIDTH, 2) for _ in range(2)], "mudd"), 0.2).eval()
    x = torch.randn(2, 5, WIDTH)
    expected = network(x)
    handle = network.blocks[1].attn.proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        network(x)
    handle.remove()
    assert torch.equal(network(x), expected)


def test_the_plain_design_is_a_sequential_of_the_same_blocks():
    blocks = [Block(WIDTH, 2) for _ in range(2)]
    plain = stepsnet.residual.connect(blocks, "plain")
    assert type(plain) is torch.nn.Sequential and list(plain) == blocks and type(plain[0]) is Block


def test_the_matrices_of_mhc_are_doubly_stochastic():
    block = deit("mhc", depths=(2,)).blocks.networks[0].blocks[0]
    x = torch.randn(2, 5, 4, WIDTH) * 10
    for connection in (block.connections[0], stirred(block.connections[1])):
        H_pre, H_post, H_res = connection.coefficients(x)
        assert (H_res > 0).all() and (H_pre > 0).all() and (H_post > 0).all() and (H_post < 2).all()
        for dim in (-1, -2):
            torch.testing.assert_close(H_res.sum(dim), torch.ones(2, 5, 4), rtol=0, atol=1e-4)
    assert H_res.std() > 0.01 and not torch.allclose(H_res, torch.eye(4), atol=0.1)  # it mixes


@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("size", [1.0, 40.0, 120.0])
def test_scalings_of_large_logits_are_those_of_the_formula(size, iterations):
    """In float32, where whole rows would be 0 without their logarithms; the reference is in logarithms throughout."""
    logits = (torch.randn(32, 4, 4) * size).requires_grad_()
    logs = logits.double()
    for _ in range(iterations):
        logs = logs - logs.logsumexp(-2, keepdim=True)
        logs = logs - logs.logsumexp(-1, keepdim=True)
    weights = torch.randn(32, 4, 4)
    ours = sinkhorn_knopp(logits, iterations)
    torch.testing.assert_close(ours.double(), logs.exp(), rtol=0, atol=1e-5)
    got, expected = (torch.autograd.grad((weights * one).sum(), logits)[0] for one in (ours, logs.exp()))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_scalings_have_the_gradient_of_the_formula():
    """Against autograd, which keeps every matrix on the way; and against finite differences."""
    logits = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    M = logits.exp()
    for _ in range(7):
        M = M / M.sum(-2, keepdim=True)
        M = M / M.sum(-1, keepdim=True)
    weights = torch.randn(4, 4, dtype=torch.float64)
    ours = sinkhorn_knopp(logits, 7)
    torch.testing.assert_close(ours, M)
    expected, got = (torch.autograd.grad((weights * one).sum(), logits)[0] for one in (M, ours))
    torch.testing.assert_close(got, expected)
    assert torch.autograd.gradcheck(lambda x: sinkhorn_knopp(x, 7), logits.detach()[:1, :1].requires_grad_())
    first = torch.autograd.grad(sinkhorn_knopp(logits, 7).square().sum(), logits, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_compiled_scalings_have_a_gradient():
    """With torch 2.11 it was 0 where they were in place."""
    logits = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, 4, dtype=torch.float64)

    def gradient(scale):
        return torch.autograd.grad((scale(logits, 20) * weights).sum(), logits)[0]

    expected = gradient(sinkhorn_knopp)
    torch.testing.assert_close(gradient(torch.compile(sinkhorn_knopp, backend="aot_eager")), expected)
    assert expected.abs().max() > 1e-6


@pytest.mark.parametrize("name", ["mhc", "hyper_connections", "alt_up"])
def test_streams_do_not_stay_copies_of_each_other(name):
    """Equal streams with equal coefficients would have equal gradients, and stay equal for ever."""
    model = deit(name, depths=(6,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(IMAGES), LABELS).backward()
        optimizer.step()
    seen = []
    container = model.blocks.networks[0]
    container.blocks[-1].register_forward_hook(lambda block, arguments, output: seen.append(output))
    model(IMAGES)
    assert seen[0].std(-2).mean() > 1e-3 * seen[0].std()
