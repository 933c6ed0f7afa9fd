"""stepsnet.compress: the function stays until channels are cut, those that carry least go, the losses are formulas."""

import copy

import pytest
import timm
import torch
import torch.distributed as dist
from timm.layers import Mlp, SwiGLU, SwiGLUPacked
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import stepsnet
from stepsnet.errors import UserError
from stepsnet.models.compress import compressed_shape

IMAGES = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 90, (6, 12), generator=torch.Generator().manual_seed(0))
POOLED = dict(class_token=False, global_pool="avg")


def stirred(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def vit(name="vit_tiny_patch16_224", **changes):
    torch.manual_seed(0)
    shape = dict(img_size=32, patch_size=8, num_classes=5, embed_dim=64, depth=6, num_heads=8)
    return stirred(timm.create_model(name, **{**shape, **changes}))


def language(config_class=LlamaConfig, model_class=LlamaForCausalLM, **changes):
    torch.manual_seed(0)
    shape = dict(vocab_size=90, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=8)
    shape |= dict(num_key_value_heads=4, head_dim=8, tie_word_embeddings=True, max_position_embeddings=32)
    return stirred(model_class(config_class(**{**shape, **changes})))


TEACHERS = {
    "pooled": (lambda: vit(**POOLED), IMAGES),
    "class token": (lambda: vit("deit3_small_patch16_224"), IMAGES),  # with LayerScale, positions for patches alone
    "registers": (lambda: vit(reg_tokens=2), IMAGES),
    "norms of queries": (lambda: vit(qk_norm=True), IMAGES),
    "packed gates": (lambda: vit(mlp_layer=SwiGLUPacked), IMAGES),
    "gates": (lambda: vit(mlp_layer=SwiGLU, **POOLED), IMAGES),
    "all tokens": (lambda: vit(global_pool=""), IMAGES),
    "llama": (language, TOKENS),
    "untied": (lambda: language(tie_word_embeddings=False), TOKENS),
    "mistral": (lambda: language(MistralConfig, MistralForCausalLM, sliding_window=8), TOKENS),
    "qwen2": (lambda: language(Qwen2Config, Qwen2ForCausalLM), TOKENS),
    "biases": (lambda: language(attention_bias=True, mlp_bias=True), TOKENS),
    "qwen3, wide heads": (lambda: language(Qwen3Config, Qwen3ForCausalLM, head_dim=16), TOKENS),
}
EVERY = pytest.mark.parametrize("name", TEACHERS)


def logits_of(model, inputs):
    output = model(inputs)
    return getattr(output, "logits", output)


@EVERY
def test_the_teacher_computes_what_the_model_does_and_one_width_is_the_whole(name):
    make, inputs = TEACHERS[name]
    model = make()
    before = copy.deepcopy(model.state_dict())
    expected = logits_of(model, inputs)
    compressed = stepsnet.compress(model, inputs, 3)
    torch.testing.assert_close(logits_of(compressed.teacher, inputs), expected, rtol=1e-4, atol=1e-4)
    whole = stepsnet.compress(model, inputs, plan={"widths": (64,), "depths": (6,)})
    torch.testing.assert_close(logits_of(whole.model.eval(), inputs), expected, rtol=1e-4, atol=1e-4)
    assert whole.stream_loss(inputs) < 1e-6
    assert compressed.widths == (32, 48, 64) and compressed.depths == (2, 2, 2)
    assert 1e-3 < compressed.stream_loss(inputs) < 2 and compressed.model.training
    assert all(parameter.requires_grad for parameter in compressed.model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())  # the given one stays


def narrow_inside(model, width, depth, heads):
    """A language model whose first blocks use some channels of a rotated stream, some heads and some hidden units."""
    size = model.config.head_dim
    torch.manual_seed(2)
    q = torch.linalg.qr(torch.randn(64, 64))[0]
    kept_heads, kept_units = torch.randperm(8)[:heads], torch.randperm(96)[: 96 * width // 64]
    silent = torch.ones(64)
    silent[width:] = 0
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(silent)
        for layer in model.model.layers[:depth]:
            attention, mlp = layer.self_attn, layer.mlp
            of_heads, of_units = torch.zeros(8, size), torch.zeros(96)
            of_heads[kept_heads], of_units[kept_units] = 1, 1
            for last, columns in ((attention.o_proj, of_heads.flatten()), (mlp.down_proj, of_units)):
                last.weight.mul_(columns).mul_(silent[:, None])
        for norm in (model.model.norm, *(n for b in model.model.layers for n in _norms(b))):
            norm.weight.fill_(1.0)
        model.lm_head.weight.copy_(model.lm_head.weight @ q)
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ q)
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for last in (attention.o_proj, mlp.down_proj):
                last.weight.copy_(q.T @ last.weight)
            for first in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                first.weight.copy_(first.weight @ q)
    return model


def _norms(layer):
    return layer.input_layernorm, layer.post_attention_layernorm


def test_a_network_that_is_narrow_inside_is_found_whole():
    """Channels, heads and hidden units that do nothing are the ones to go; a norm keeps the divisor of all channels."""
    model = narrow_inside(language(tie_word_embeddings=False, num_key_value_heads=8), 32, 3, heads=4)
    expected = model(TOKENS).logits
    compressed = stepsnet.compress(model, TOKENS, plan={"widths": (32, 64), "depths": (3, 3)})
    torch.testing.assert_close(compressed.model.eval()(TOKENS).logits, expected, rtol=1e-3, atol=1e-3)
    torch.manual_seed(3)
    q = torch.linalg.qr(torch.randn(64, 64))[0]
    other = stepsnet.compress(model, TOKENS, plan={"widths": (32, 64), "depths": (3, 3)}, rotation=q)
    assert (other.model.eval()(TOKENS).logits - expected).abs().max() > 0.1  # by chance it is not


def test_the_losses_are_their_formulas():
    compressed = stepsnet.compress(vit(**POOLED), IMAGES, 2)
    student, teacher = compressed.model.eval(), compressed.teacher
    labels = torch.arange(16) % 5
    ours, theirs = student(IMAGES).softmax(-1), teacher(IMAGES).softmax(-1)
    entropy = -ours[torch.arange(16), labels].log().mean()
    divergence = (theirs * (theirs / ours).log()).sum(-1).mean()
    torch.testing.assert_close(compressed.logit_loss(IMAGES, labels), (entropy + divergence) / 2)
    y, t = (model.patch_embed(IMAGES) + model.pos_embed for model in (student, teacher))
    errors = []
    for index, (block, whole) in enumerate(zip(student.blocks, teacher.blocks), 1):
        y, t = block(y), whole(t)
        if index in (3, 6):
            width = compressed.widths[index // 3 - 1]
            errors.append((y - t)[..., :width].square().sum() / t[..., :width].square().sum())
    torch.testing.assert_close(compressed.stream_loss(IMAGES), (errors[0] + errors[1]) / 2)


def test_tokens_without_a_label_count_for_nothing():
    compressed = stepsnet.compress(language(), TOKENS, 2)
    labels = torch.cat((TOKENS[:, 1:], torch.full((6, 1), -100)), 1)
    theirs, ours = (model(TOKENS).logits[:, :-1].flatten(0, 1) for model in (compressed.teacher, compressed.model))
    divergence = F.kl_div(ours.log_softmax(-1), theirs.softmax(-1), reduction="batchmean")
    expected = 0.5 * F.cross_entropy(ours, TOKENS[:, 1:].flatten()) + 0.5 * divergence
    torch.testing.assert_close(compressed.logit_loss(TOKENS, labels), expected)


@pytest.mark.parametrize("name", ["pooled", "llama"])
def test_it_is_distilled_and_what_comes_out_is_an_ordinary_model(name, tmp_path):
    make, inputs = TEACHERS[name]
    compressed = stepsnet.compress(make(), [inputs[:4], inputs[4:]], 3)
    labels = torch.arange(16) % 5 if name == "pooled" else inputs
    optimizer = torch.optim.AdamW(compressed.model.parameters(), lr=2e-3)
    for loss_of in (compressed.stream_loss, lambda inputs: compressed.logit_loss(inputs, labels)):
        losses = []
        for _ in range(12):
            loss = loss_of(inputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0]
    model = compressed.model.eval()
    if name == "pooled":
        assert isinstance(model, timm.models.VisionTransformer) and isinstance(model.blocks, stepsnet.StepsNet)
        again = copy.deepcopy(model)
        again.load_state_dict(model.state_dict())
        assert [f.shape[1] for f in model.forward_intermediates(inputs, intermediates_only=True)] == [64] * 6
    else:
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        found = [model.generate(inputs[:1], max_new_tokens=4, do_sample=False, use_cache=use) for use in (True, False)]
        assert torch.equal(*found)
    torch.testing.assert_close(logits_of(again, inputs), logits_of(model, inputs))


@pytest.mark.parametrize("changes", [{}, {"init_values": 0.5, **POOLED}])
def test_a_compressed_vit_comes_back_from_its_weights(changes):
    """Into one of a fresh model, by the same steps or by the plan that they gave."""
    compressed = stepsnet.compress(vit(**changes), IMAGES, steps=2)
    fresh = vit(**changes)
    nn.init.zeros_(fresh.head.weight)
    for how in ({"steps": 2}, {"plan": {"widths": compressed.widths, "depths": compressed.depths}}):
        again = compressed_shape(fresh, **how)
        again.load_state_dict(compressed.model.state_dict())
        with torch.no_grad():
            assert torch.equal(again.eval()(IMAGES), compressed.model.eval()(IMAGES))
        assert all(parameter.requires_grad for parameter in again.parameters())


def test_a_step_without_blocks_asks_for_no_directions():
    model = vit(**POOLED)
    with_empty = stepsnet.compress(model, IMAGES, plan={"widths": (32, 48, 64), "depths": (0, 3, 3)})
    without = stepsnet.compress(model, IMAGES, plan={"widths": (48, 64), "depths": (3, 3)})
    torch.testing.assert_close(with_empty.model(IMAGES), without.model(IMAGES))
    torch.testing.assert_close(with_empty.stream_loss(IMAGES), without.stream_loss(IMAGES))


def test_heads_that_do_not_tile_the_width():
    model = language(Qwen3Config, Qwen3ForCausalLM, hidden_size=80, num_attention_heads=12, head_dim=16)
    compressed = stepsnet.compress(model, TOKENS, 2)
    assert compressed.widths == (56, 80)
    torch.testing.assert_close(compressed.teacher(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4)
    whole = stepsnet.compress(model, TOKENS, plan={"widths": (80,), "depths": (6,)})
    torch.testing.assert_close(whole.model.eval()(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_calibration_comes_as_data_do():
    """What a DataLoader yields, in whatever batches; a token whose embedding is zero does no harm."""
    model = vit(**POOLED)
    expected = stepsnet.compress(model, IMAGES, 2).model.state_dict()
    pairs = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(IMAGES, torch.arange(16)), 5)
    for given in (pairs, [(IMAGES[:3], None), (IMAGES[3:], None)], ({"pixel_values": IMAGES},)):
        found = stepsnet.compress(model, given, 2).model.state_dict()
        for key, value in expected.items():  # a direction has no sign
            torch.testing.assert_close(found[key].abs(), value.abs(), rtol=1e-2, atol=1e-3)
    padded = language(pad_token_id=0)
    with torch.no_grad():
        padded.model.embed_tokens.weight[0] = 0
    ids = torch.cat((torch.zeros_like(TOKENS[:, :2]), TOKENS), 1)
    assert all(value.isfinite().all() for value in stepsnet.compress(padded, ids, 2).model.state_dict().values())


def test_both_networks_go_to_another_precision_and_the_model_may_be_wrapped():
    compressed = stepsnet.compress(vit(**POOLED), IMAGES, 2).to(torch.float64)
    losses = compressed.stream_loss(IMAGES.double()), compressed.logit_loss(IMAGES.double(), torch.arange(16) % 5)
    assert all(loss.dtype == torch.float64 for loss in losses)

    class Wrapped(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    compressed.model = Wrapped(compressed.model)
    torch.testing.assert_close(compressed.stream_loss(IMAGES.double()), losses[0])
    compressed.model.module.blocks = nn.Identity()
    with pytest.raises(UserError, match="stream_loss: the model's blocks cannot be read"):
        compressed.stream_loss(IMAGES.double())


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(16, 5), r"labels: got torch.float32 of shape \(16, 5\), expected whole numbers of shape \(16,\)"),
        (torch.zeros(15, dtype=torch.long), r"labels: got torch.int64 of shape \(15,\), expected whole numbers"),
        (torch.full((16,), -100), "labels: got only -100"),
    ],
)
def test_labels_that_do_not_fit_are_one_line(labels, message):
    with pytest.raises(UserError, match=message):
        stepsnet.compress(vit(**POOLED), IMAGES, 2).logit_loss(IMAGES, labels)


class OwnHead(timm.models.VisionTransformer):
    def forward_head(self, x, pre_logits=False):
        return self.head(self.pool(x).tanh())


class OtherMlp(Mlp):
    """Whose layers may be used in another way than timm's."""


def odd():
    model = vit(**POOLED)
    model.blocks[2].mlp.fc1 = nn.Sequential(model.blocks[2].mlp.fc1)
    return model


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=90, n_embd=64, n_layer=4, n_head=4, n_positions=32))


def joined():
    model = vit()
    model.blocks = stepsnet.residual.connect(model.blocks, "mhc", streams=2)
    return model


PLAN = {"widths": (32, 64), "depths": (3, 3)}


@pytest.mark.parametrize(
    ("make", "inputs", "options", "message"),
    [
        (lambda: "vit", IMAGES, {}, "compress: got 'vit', expected a model with its weights"),
        (lambda: timm.create_model("test_resnet"), IMAGES, {}, "compress: got ResNet, expected a VisionTransformer"),
        (gpt2, TOKENS, {}, "compress: got GPT2LMHeadModel, expected a causal language model of LLaMA"),
        (lambda: language().model, TOKENS, {}, "compress: got LlamaModel, expected a causal language model"),
        (lambda: stepsnet.stepify(vit(), 2), IMAGES, {}, "VisionTransformer is in steps already"),
        (joined, IMAGES, {}, "compress: a design of the residual stream joins the blocks, expected a model without"),
        (lambda: vit(num_classes=0), IMAGES, {}, "VisionTransformer.head: got Identity, expected Linear"),
        (lambda: vit(pre_norm=True), IMAGES, {}, r"VisionTransformer.norm_pre.weight: got an unknown part, expected"),
        (lambda: vit(qkv_bias=False), IMAGES, {}, "a linear layer after norm1 of Block has no bias"),
        (lambda: vit("vit_tiny_patch16_224", block_fn=timm.models.vision_transformer.ResPostBlock), IMAGES, {}, "got "),
        (odd, IMAGES, {}, "mlp.fc1 of Block is not a linear layer, expected one"),
        (vit, IMAGES, {"steps": 9}, "steps: got 9, expected 1 to 6, the model's number of blocks"),
        (
            lambda: vit(num_heads=2),
            IMAGES,
            {},
            "steps: got 3 for width 64 in multiples of 32, expected fewer: the widths would",
        ),
        (
            vit,
            IMAGES,
            {"plan": {"widths": (32, 64), "depths": (3, 4)}},
            r"plan: depths: got \(3, 4\), expected a sum of 6",
        ),
        (
            vit,
            IMAGES,
            {"plan": {"widths": (64, 32), "depths": (3, 3)}},
            "plan: widths: got .*expected increasing widths",
        ),
        (
            vit,
            IMAGES,
            {"plan": {"widths": (36, 64), "depths": (3, 3)}},
            "plan: widths: got 36, expected a multiple of 8",
        ),
        (vit, IMAGES, {"plan": {**PLAN, "num_heads": (2, 8)}}, r"plan: num_heads: got \(2, 8\), expected \(4, 8\)"),
        (vit, IMAGES, {"plan": {"widths": 32, "depths": (3, 3)}}, "plan: widths: got 32, expected a list"),
        (vit, IMAGES, {"rotation": torch.ones(64, 64)}, "rotation: got .*expected an orthogonal matrix of 64 by 64"),
        (lambda: vit(global_pool="max"), IMAGES, {}, "global_pool: got 'max', which depends on how the stream is"),
        (lambda: vit(patch_drop_rate=0.5), IMAGES, {}, "patch_drop_rate: got a model that drops patches"),
        (lambda: OwnHead(img_size=32, patch_size=8), IMAGES, {}, "OwnHead.forward_head: got a method of its own"),
        (lambda: vit(final_norm=False), IMAGES, {}, "VisionTransformer has no norm in front of its head"),
        (lambda: vit(mlp_layer=OtherMlp), IMAGES, {}, "compress: got blocks of Block"),
        (vit, 3, {}, "calibration: got int, expected a tensor of inputs, or batches of them"),
        (vit, IMAGES[0], {}, r"calibration: got \(3, 32, 32\), expected images \(B, C, H, W\) or token ids"),
        (vit, [IMAGES.numpy()], {}, "calibration: got ndarray, expected images"),
        (vit, IMAGES, {"rotation": "x"}, "rotation: got str, expected an orthogonal matrix of 64 by 64"),
        (vit, [], {}, "calibration: got no inputs"),
        (
            vit,
            torch.randn(2, 3, 16, 16),
            {},
            r"calibration: the model does not take inputs of shape \(2, 3, 16, 16\): AssertionError: Input height",
        ),
        (vit, torch.full((2, 3, 32, 32), torch.nan), {}, "calibration: the model's outputs are not finite"),
    ],
)
def test_a_mistake_is_one_line(make, inputs, options, message):
    with pytest.raises(UserError, match=message) as error:
        stepsnet.compress(make(), inputs, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_model_of_timm_without_its_create_model(depth):
    torch.manual_seed(0)
    args = dict(img_size=32, patch_size=8, depth=depth, embed_dim=64, num_heads=4, num_classes=5)
    given = timm.models.VisionTransformer(**args).eval()
    done = stepsnet.compress(given, IMAGES, 1)
    torch.testing.assert_close(done.model(IMAGES), given(IMAGES), atol=1e-4, rtol=1e-4)
    assert compressed_shape(given.train(), 1).training


def test_the_stream_is_distilled_in_ddp(tmp_path):
    compressed = stepsnet.compress(vit(), IMAGES, steps=2)
    alone = copy.deepcopy(compressed)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    try:
        compressed.model = nn.parallel.DistributedDataParallel(compressed.model)
        for _ in range(2):  # the second waits for what the first has not reduced
            compressed.stream_loss(IMAGES).backward()
            alone.stream_loss(IMAGES).backward()
    finally:
        dist.destroy_process_group()
    for ours, theirs in zip(compressed.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, torch.zeros_like(ours) if theirs.grad is None else theirs.grad)


def test_a_norm_is_folded_by_what_it_does():
    class RmsNormOfGemma(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(width))

        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)

    model = vit()
    for owner, name in [(model, "norm"), *((block, name) for block in model.blocks for name in ("norm1", "norm2"))]:
        setattr(owner, name, RmsNormOfGemma(model.embed_dim))
    with pytest.raises(UserError, match="RmsNormOfGemma, expected a LayerNorm or RMSNorm with gains"):
        stepsnet.compress(model, IMAGES, steps=2)


def test_a_gate_that_reads_the_stream_is_not_passed_over():
    model = vit()
    model.blocks[1].attn.gate = nn.Linear(64, 64)
    with pytest.raises(UserError, match=r"attn\.gate of Block: got a layer that compress does not know"):
        stepsnet.compress(model, IMAGES)
