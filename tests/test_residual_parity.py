"""Designs of the residual stream against implementations of others, with copied weights.

docs/depth-bench.md says what is compared with what, and what differs.
"""

import deep_cross_attention
import hyper_connections
import pytest
import torch
from fla.ops.attnres.naive import naive_attnres
from residual_networks import WIDTH, stirred
from timm.models.vision_transformer import Block
from torch import nn
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp, Gemma3nTextLaurelBlock

import stepsnet.residual
from stepsnet.residual.alt_up import AltUp
from stepsnet.residual.deep_cross_attention import DeepCrossAttention
from stepsnet.residual.design import Place
from stepsnet.residual.hyper_connections import HyperConnections
from stepsnet.residual.laurel import LAuReL
from stepsnet.residual.mhc import MHC


def test_mhc_has_the_coefficients_of_deepseeks_model():
    """Its Sinkhorn begins with a softmax over rows and ends with columns, ours with rows; both have converged."""
    theirs = DeepseekV4HyperConnection(DeepseekV4Config(hidden_size=WIDTH, hc_mult=4, rms_norm_eps=1e-6))
    ours = stirred(MHC(Place(WIDTH, 1, 2, 1, 1), {"streams": 4, "iterations": 20}), 0.2)
    with torch.no_grad():
        # their matrix has inputs by rows, Mixed = combᵀ In: the transpose of H_res
        order = torch.cat((torch.arange(8), 8 + torch.arange(16).view(4, 4).T.flatten()))
        theirs.fn.copy_(ours.phi.T[order])
        theirs.base.copy_(ours.b[order])
        theirs.scale.copy_(ours.alpha)
        x = torch.randn(2, 3, 4, WIDTH)
        post, comb, collapsed = theirs(x)
        H_pre, H_post, H_res = ours.coefficients(x)
    torch.testing.assert_close(H_post, post, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(H_res, comb.transpose(-2, -1), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close((H_pre.unsqueeze(-1) * x).sum(-2), collapsed, rtol=1e-4, atol=1e-4)


def test_hyper_connections_are_those_of_an_independent_package():
    """It has RMSNorm with a weight in place of the paper's LayerNorm, which is put in here, and ends in a sum."""
    ours = stirred(HyperConnections(Place(WIDTH, 2, 4, 1, 2), {"streams": 4, "dynamic": True}), 0.3)
    branch = torch.nn.Linear(WIDTH, WIDTH)
    theirs = hyper_connections.HyperConnections(4, dim=WIDTH, branch=branch, layer_index=1)
    theirs.norm = torch.nn.LayerNorm(WIDTH, elementwise_affine=False)
    with torch.no_grad():
        theirs.static_alpha.copy_(torch.cat((ours.A_m[:, None], ours.A_r.view(4, 4)), 1))
        theirs.static_beta.copy_(ours.B)
        theirs.dynamic_alpha_fn.copy_(ours.W[:, :5])
        theirs.dynamic_beta_fn.copy_(ours.W[:, 5])
        theirs.dynamic_alpha_scale.copy_(ours.s[0])
        theirs.dynamic_beta_scale.copy_(ours.s[1])
    H = torch.randn(2, 3, 4, WIDTH)
    flat = theirs(H.permute(0, 2, 1, 3).reshape(8, 3, WIDTH))  # theirs has the streams in the batch
    torch.testing.assert_close(ours(H, branch), flat.view(2, 4, 3, WIDTH).permute(0, 2, 1, 3))


@pytest.mark.parametrize("layer", [1, 2])
def test_alt_up_predicts_and_corrects_as_gemma_3n(layer):
    """Its coefficients depend on the token by a router, which is held at a constant here, and p is I plus what is
    learned; its active stream is one for all layers, ours takes turns."""
    n, active = 2, (layer - 1) % 2
    ours = stirred(AltUp(Place(WIDTH, layer, 2, layer, 2), {"streams": n}), 0.5).double()
    theirs = Gemma3nTextAltUp(
        Gemma3nTextConfig(hidden_size=WIDTH, altup_num_inputs=n, altup_active_idx=active)
    ).double()
    theirs.compute_router_modalities = lambda x: torch.tensor([1.0, 0.0], dtype=x.dtype).expand(*x.shape[:-1], n)
    with torch.no_grad():
        theirs.prediction_coefs.weight.zero_()[:, 0] = ours.p - torch.eye(n, dtype=torch.double).flatten()
        theirs.correction_coefs.weight.zero_()[:, 0] = ours.g - 1
        x = torch.randn(2, 3, n, WIDTH, dtype=torch.double)
        branch = nn.Linear(WIDTH, WIDTH).double()
        stacked = x.movedim(-2, 0)  # theirs has the streams in front
        expected = theirs.eval().correct(theirs.predict(stacked), branch(stacked[active]))
        torch.testing.assert_close(ours(x, branch), expected.movedim(0, -2))


def test_laurel_is_that_of_gemma_3n_without_its_norm():
    """It puts an RMSNorm behind the low-rank map, the map around the attention alone and on its normed input, and the
    sum over √2; the paper has none of these."""
    ours = stirred(LAuReL(Place(WIDTH, 1, 2, 1, 1), {"rank": 4}), 0.3)
    theirs = Gemma3nTextLaurelBlock(Gemma3nTextConfig(hidden_size=WIDTH, laurel_rank=4))
    theirs.post_laurel_norm = nn.Identity()
    with torch.no_grad():
        theirs.linear_left.weight.copy_(ours.B)
        theirs.linear_right.weight.copy_(ours.A)
        x = torch.randn(2, 3, WIDTH)
        torch.testing.assert_close(ours(x, torch.zeros_like), theirs(x))


@pytest.mark.parametrize(
    ("name", "options", "size"), [("attention_residuals", {}, 1), ("attention_residuals_block", {"groups": 3}, 4)]
)
def test_attention_residuals_are_those_of_flash_linear_attention(name, options, size):
    """Its RMSNorm has a weight beside w; it decides on groups by their size, and so do we after division."""
    blocks = [Block(WIDTH, 2) for _ in range(5)]
    network = stirred(stepsnet.residual.connect(blocks, name, **options), 0.2).eval()
    weight = torch.rand(WIDTH) + 0.5

    def mixed(query, sources):
        return naive_attnres(query.w / weight, sources, weight)

    x = torch.randn(2, 3, WIDTH)
    states, total = [], x  # sums that are closed, and the one that is open; the start of the stream is the first
    with torch.no_grad():
        for layer in range(10):
            block, index = network.blocks[layer // 2], layer % 2
            h = mixed(block.connections[index].query, [*states, total]) if layer else x
            if layer % size == 0:
                states, total = [*states, total], 0
            norm, branch = (block.norm1, block.attn) if index == 0 else (block.norm2, block.mlp)
            total = total + branch(norm(h))
        torch.testing.assert_close(network(x), mixed(network.wiring.query, [*states, total]))


def test_a_grn_of_deep_cross_attention_is_that_of_an_independent_package():
    """It has an RMSNorm in front of w, which is taken out here, and starts w at random where the paper has 0."""
    ours = stirred(DeepCrossAttention(Place(WIDTH, 4, 6, 4, 6), {"last": 0}).grn, 0.5)
    theirs = deep_cross_attention.GRN(WIDTH, num_layers=4, num_outputs=3)
    theirs.to_aggregate[0] = nn.Identity()
    with torch.no_grad():
        theirs.to_aggregate[1].weight.copy_(ours.w.T)
        theirs.bias.copy_(ours.b.view(4, 3, WIDTH).transpose(0, 1))
        G = torch.randn(4, 2, 3, WIDTH)
        torch.testing.assert_close(torch.stack(ours(list(G))), theirs(G))
