"""What a design costs, in parameters, multiply-accumulates and traffic, against the formulas that its file gives."""

import json

import pytest
import torch
from residual_networks import OPTIONS, PLAIN, STEPS, WIDTH, deit
from timm.models.vision_transformer import Block

import stepsnet.residual
from stepsnet.analysis.design_costs import design_costs, profile_costs, stream_traffic
from stepsnet.analysis.memory import activation_bytes
from stepsnet.cli import main
from stepsnet.macs import count_forward
from stepsnet.residual import DESIGNS, Connection, Wiring

EVERY = pytest.mark.parametrize("name", DESIGNS)
T, C, H = 4, WIDTH, 2  # blocks, width, heads; an MLP of 4C; LayerNorms of weight and bias
L = 2 * T  # branches
NORMS = 2 * 2 * C  # of the branches of a block
n, r = 4, OPTIONS["laurel"]["rank"]


def of_mudd(last_ways=1):
    ways = [4] * (T - 1) + [last_ways]
    return sum(C * (K := 4 * (i + 1)) + (K + 1) * way * (i + 1) for i, way in enumerate(ways, 1))


PARAMETERS = {  # beside the plain network's
    "plain": 0,
    "layer_scale": L * C,
    "rezero": L - T * NORMS,
    "deepnorm": 0,
    "fixup": T * (6 - NORMS),
    "normformer": T * (H + 2 * C + 8 * C),
    "layer_norm_scaling": 0,
    "peri_ln": L * 2 * C,
    "complete_p": 0,
    "value_residual": 2 * (T - 1),
    "lambdas": 2 * T - 1,
    "dense_former": sum(i + 1 for i in range(1, T + 1)),
    "deep_cross_attention": sum(3 * (t + 1) * C for t in range(1, T + 1)) + (T + 2) * C,
    "mudd": of_mudd(),
    "laurel": L * 2 * r * C,
    "alt_up": T * (2 * 2 + 2),
    "hyper_connections": L * (n**2 + 2 * n + 2 + (n + 2) * C),
    "mhc": L * ((n**2 + 2 * n) * (n * C + 1) + 3),
    "attention_residuals": (L - 1) * C + C,
    "attention_residuals_block": (L - 1) * C + C,
}


@EVERY
def test_parameters_are_those_of_the_documented_formula(name):
    blocks = [Block(C, H, qkv_bias=True) for _ in range(T)]
    before = sum(p.numel() for block in blocks for p in block.parameters())
    network = stepsnet.residual.connect(blocks, name, **OPTIONS.get(name, {}))
    assert sum(p.numel() for p in network.parameters()) - before == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("hyper_connections", {"dynamic": False}, L * (n**2 + 2 * n)),
        ("mudd", {"prepost_norm": True}, of_mudd() + C + (T - 1) * 5 * C + 2 * C),
        ("deep_cross_attention", {"last": 1}, 3 * (2 + 3 + 4 + 4) * C + 4 * C),  # 1, 2, 3, 3 sources, and 3
    ],
)
def test_parameters_with_options(name, options, expected):
    blocks = [Block(C, H) for _ in range(T)]
    before = sum(p.numel() for block in blocks for p in block.parameters())
    network = stepsnet.residual.connect(blocks, name, **options)
    assert sum(p.numel() for p in network.parameters()) - before == expected


def weighed(sources):
    """Several v are read and one sum is written."""
    return sum(count + 1 for count in sources)


def traffic_of(name, T):
    """Of a stream of T blocks from end to end: what is read and written, kernel by kernel."""
    L, n = 2 * T, 4
    several = {
        "value_residual": 3 * L + 3 * (T - 1),
        "lambdas": 3 * L + 2 + 3 * (T - 1),
        "dense_former": 3 * L + weighed(i + 1 for i in range(1, T + 1)),
        # q, k and v; q + A, and its sum with the MLP; the end
        "deep_cross_attention": sum(t + 3 + 3 + 3 for t in range(1, T + 1)) + (T + 1) + 1,
        "mudd": 3 * L + sum(i + 1 + 4 for i in range(1, T)) + (T + 1 + 1),
        "alt_up": 3 * L + T * (2 + 1 + 2) + 2 + 1,
        "hyper_connections": L * (n + 1 + n + 1 + n) + n + 1,
        "mhc": L * (n + 1 + n + 1 + n) + n + 1,
        "attention_residuals": weighed(range(2, L + 1)) + (L + 1) + 1,
    }
    return several.get(name, 3 * L) / T


@EVERY
@pytest.mark.parametrize("blocks", [1, 6, 12])
def test_traffic_is_that_of_the_formula(name, blocks):
    if name == "attention_residuals_block":
        return  # below
    assert stream_traffic([C], [blocks], name) == pytest.approx(traffic_of(name, blocks))


def test_traffic_in_numbers():
    for name, expected in {
        "attention_residuals": (17.0, 29.0, 101.0),
        "attention_residuals_block": (14.0, 17.0, 18.5),
        "deep_cross_attention": (13.8, 16.7, 34.5),
    }.items():
        found = [stream_traffic([C], [blocks], name) for blocks in (6, 12, 48)]
        assert found == pytest.approx(expected, abs=0.05), name


def test_traffic_of_groups_by_going_through_the_layers():
    """10 branches in groups of 4, 4 and 2."""
    total, state = 0, 1
    for layer in range(10):
        total += state + 1 if layer else 0
        total += 3 if layer % 4 else 0  # added to the sum of its group
        state += layer % 4 == 0
    total += state + 1
    assert state == 4 and stream_traffic([C], [5], "attention_residuals_block", {"groups": 3}) == total / 5


def test_traffic_with_options():
    # 1, 2, 3, 3, 3 sources and 3 at the end; behind the third and later ones, one joins those in between
    found = stream_traffic([C], [5], "deep_cross_attention", {"last": 1})
    assert found == pytest.approx((1 + 2 + 3 + 3 + 3 + 5 * (3 + 6) + 3 * 3 + 3 + 1) / 5)
    # X_0, and X_i behind four blocks, are written normed too
    plain, normed = (stream_traffic([C], [5], "mudd", {"prepost_norm": one}) for one in (False, True))
    assert normed - plain == pytest.approx((2 + 4) / 5)
    found = stream_traffic([C], [4], "dense_former", {"dilation": 2, "period": 2})
    assert found == pytest.approx(6 + ((2 + 1) + (3 + 1)) / 4)  # X_0, X_2; X_0, X_2, X_4
    assert stream_traffic([C], [5], "alt_up", {"streams": 3}) == pytest.approx(6 + 7 + 4 / 5)
    assert stream_traffic([8, C], [0, 5], "mhc") == pytest.approx(stream_traffic([C], [5], "mhc") + 2 / 5)


def test_a_stepsnet_costs_what_its_widths_say():
    steps, reverse, bowtie = profile_costs()
    assert steps.options == {"widths": [192, 272, 384], "depths": [12, 6, 6]} and steps.blocks == 24
    read_and_written = 6 * (12 * 192 + 6 * 272 + 6 * 384) / 384
    assert steps.traffic == pytest.approx((read_and_written + 2 * (272 + 384) / 384) / 24)  # joined at two places
    assert reverse.traffic == pytest.approx((read_and_written + 2) / 24)  # at the end, where all channels meet
    assert bowtie.options["depths"] == [3, 12, 3] and bowtie.macs == pytest.approx(steps.macs, rel=0.02)


@EVERY
def test_its_costs_are_counted_without_a_device(name):
    with torch.device("meta"):
        ours, plain = (deit(one, **STEPS) for one in (name, "plain"))
    macs, of_plain = (count_forward(model, torch.empty(1, 3, 8, 8, device="meta"))[0] for model in (ours, plain))
    assert macs > of_plain if name in ("laurel", "alt_up", "hyper_connections", "mhc") else macs > 0.7 * of_plain
    assert activation_bytes(ours, (3, 8, 8), 1) > 0.7 * activation_bytes(plain, (3, 8, 8), 1)


MACS = {  # a token, beside the plain network's; 5 an element of a LayerNorm
    "normformer": T * 5 * (C + 4 * C),
    "peri_ln": L * 5 * C,
    "rezero": -L * 5 * C,
    # w, and two norms more: of q, k and v each
    "deep_cross_attention": sum(3 * t * C + 10 * C for t in range(1, T + 1)) + (T + 1) * C,
    "mudd": of_mudd() - 4 * sum(i + 1 for i in range(1, T)) - (T + 1) + T * 10 * C,  # without a
    "laurel": L * 2 * r * C,
    "alt_up": T * 2 * 2 * C,
    "hyper_connections": L * ((n + 2) * n * C + n * n * C),
    "mhc": L * ((n**2 + 2 * n) * n * C + n**2 * C),
    "attention_residuals": sum(range(2, L + 2)) * C,
    "attention_residuals_block": (2 + 2 + 2 + 3 + 3 + 3 + 4 + 4) * C,  # 8 branches in groups of 3, 3 and 2
}


@pytest.mark.parametrize("name", MACS)
def test_multiply_accumulates_are_those_of_the_formula(name):
    """But for products of elements, which the count leaves out."""
    with torch.device("meta"):
        ours, plain = (deit(one, depths=(T,)) for one in (name, "plain"))
    macs, of_plain = (count_forward(model, torch.empty(1, 3, 8, 8, device="meta"))[0] for model in (ours, plain))
    tokens = (PLAIN["img_size"] // PLAIN["patch_size"]) ** 2
    assert macs - of_plain == tokens * MACS[name]


class Doubled(Connection):
    """Of a stream and its start, without a word on traffic."""

    class Both(Wiring):
        def start(self, x):
            return x, x

        def finish(self, state):
            return state[1]

    title, source, wiring = "as plain, beside the start", "nowhere", Both

    def forward(self, state, F):
        return state[0], state[1] + F(state[1])


def test_a_design_of_ones_own_by_name(monkeypatch, capsys):
    monkeypatch.setitem(DESIGNS, "mine", Doubled)
    (mine,) = design_costs(C, 2, 2, names=["mine"])
    assert mine.traffic is None and mine.params > 0
    assert stream_traffic([C], [2], "mine") is None
    main(["models", "--residual", "mine"])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "`mine`" and cells[6:] == ["+0.0%", "+0.0%", "–", "1.00"]
    main(["models", "--residual", "complete_p", "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["name"] == "complete_p" and found["traffic"] == 6.0
    assert main(["models", "--residual", "min"]) == 2
    assert "residual: got 'min', expected one of" in capsys.readouterr().err


def test_what_has_a_wiring_says_its_traffic():
    assert all(d is None or d.traffic(8, dict(d.options)) is not None for d in DESIGNS.values())
