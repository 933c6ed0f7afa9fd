"""A grown network computes what the trained one does, and all of it learns: timm's ViTs and transformers' LLaMAs."""

import copy

import pytest
import timm
import torch
import transformers
from model_families import images
from timm.models import group_parameters
from timm.models.vision_transformer import ResPostBlock
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import stepsnet
from stepsnet import StepsTransformerConfig, StepsTransformerForCausalLM
from stepsnet.errors import UserError
from stepsnet.models.blocks import blocks_of, widths_of
from stepsnet.models.slice_norm import SliceNorm

VIT = dict(img_size=16, patch_size=8, embed_dim=48, depth=4, num_heads=3, num_classes=5)
POOLED = dict(class_token=False, global_pool="avg", init_values=0.1, drop_path_rate=0.2, mlp_layer=timm.layers.SwiGLU)
CLIP = dict(pre_norm=True, reg_tokens=2, norm_layer=timm.layers.RmsNorm, no_embed_class=True, qk_norm=True)
STEPS = dict(img_size=16, patch_size=8, widths=(48,), depths=(4,), num_heads=(3,), num_classes=5)
LLAMA = dict(vocab_size=31, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=64)
GROUPED = dict(num_key_value_heads=2, intermediate_size=176)
OURS = dict(vocab_size=31, widths=(64,), depths=(4,), num_attention_heads=(4,), embedding_scale=8.0)
MODELS = {
    "vit": lambda: timm.create_model("vit_tiny_patch16_224", **VIT),
    "pooled": lambda: timm.create_model("vit_tiny_patch16_224", **VIT, **POOLED),
    "clip": lambda: timm.create_model("vit_tiny_patch16_224", **VIT, **CLIP),
    "distilled": lambda: timm.create_model("deit_tiny_distilled_patch16_224", **VIT),
    "steps-deit": lambda: timm.create_model("steps_deit_tiny_patch16_224", **STEPS),
    "stepified": lambda: stepsnet.stepify("vit_tiny_patch16_224", 2, **VIT),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, **GROUPED)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "wide heads": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, **GROUPED, head_dim=32)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**LLAMA, **GROUPED, head_dim=24, tie_word_embeddings=False)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**LLAMA, **GROUPED)),
    "phi3": lambda: transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**LLAMA, **GROUPED, pad_token_id=0, original_max_position_embeddings=64)
    ),
    "granite": lambda: transformers.GraniteForCausalLM(transformers.GraniteConfig(**LLAMA, residual_multiplier=0.5)),
    "a classifier": lambda: LlamaForSequenceClassification(LlamaConfig(**LLAMA, pad_token_id=0)),
    "steps-transformer": lambda: StepsTransformerForCausalLM(StepsTransformerConfig(**OURS)),
    "untied": lambda: StepsTransformerForCausalLM(StepsTransformerConfig(**OURS, tie_word_embeddings=False)),
}
EVERY = pytest.mark.parametrize("name", MODELS)
IMAGES = images(16, batch=4)
IDS = torch.arange(1, 31).repeat(2, 1)  # every token but that of padding
HOW = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)


def make(name, dtype=torch.float64):
    """A model as if trained: no weight is where its initialization puts it."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.15)
    return model.to(dtype).eval()


def grown(model, steps=None, **options):
    torch.manual_seed(1)
    return stepsnet.grow(model, steps, **options)


def outputs(model):
    """Logits; of a classifier those of each token's prefix are its own."""
    if hasattr(model, "config"):
        return model(IDS).logits
    found = model(IMAGES.to(next(model.parameters()).dtype))
    return torch.stack(found) if isinstance(found, tuple) else found


@EVERY
def test_the_function_stays_and_everything_learns(name):
    model = make(name)
    before = copy.deepcopy(model.state_dict())
    expected = outputs(model)
    ours = grown(model)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert isinstance(ours, type(model)) and not any(m.training for m in ours.modules())
    torch.testing.assert_close(outputs(ours), expected, rtol=0, atol=1e-10)
    single = make(name, torch.float32)
    torch.testing.assert_close(outputs(grown(single)), outputs(single))

    blocks, old = blocks_of(ours), len(blocks_of(model)) if widths_of(model) else 4
    assert widths_of(ours)[old:] == [max(widths_of(ours))] * (len(blocks) - old) and len(blocks) > old
    inside = ("blocks.", "model.layers.")
    kept = {key: tensor for key, tensor in ours.state_dict().items() if key in before and key.startswith(inside)}
    assert kept and all(torch.equal(tensor, before[key]) for key, tensor in kept.items())

    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    moved = {key: torch.zeros_like(parameter) for key, parameter in ours.named_parameters()}
    for update in range(3):
        optimizer.zero_grad()
        outputs(ours).square().mean().backward()
        for key, parameter in ours.named_parameters():
            moved[key] += parameter.grad.abs()
        optimizer.step()
        if update == 1:
            assert all(gradient.any() for gradient in moved.values())
    moved = {key: moved[key][1:] if "embed_tokens" in key else moved[key] for key in moved}  # padding is not seen
    no_gradient = (".attn.qkv.bias", ".attn.k_norm.bias")  # keys' biases move all scores alike
    stuck = [key for key, gradient in moved.items() if not gradient.all() and not key.endswith(no_gradient)]
    assert not stuck


@pytest.mark.parametrize("name", ["vit", "steps-deit", "llama", "tied", "steps-transformer"])
def test_a_grown_network_grows_again(name):
    model = make(name)
    twice, at_once = grown(grown(model)), grown(model, 3)
    assert widths_of(twice) == widths_of(at_once)
    for ours in (twice, at_once):
        torch.testing.assert_close(outputs(ours), outputs(model), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["vit", "pooled", "clip", "steps-deit"])
def test_what_timm_calls(name):
    model = make(name, torch.float32)
    ours = grown(model)
    width = max(widths_of(ours))
    assert (ours.num_features, ours.embed_dim, ours.get_classifier().in_features) == (width, width, width)
    final, middle = ours.forward_intermediates(IMAGES)
    torch.testing.assert_close(final, ours.forward_features(IMAGES))
    assert len(middle) == len(ours.feature_info) == len(blocks_of(ours))
    assert {feature.shape[1] for feature in middle} == {info["num_chs"] for info in ours.feature_info} == {width}
    assert all(ours.get_submodule(info["module"]) is block for info, block in zip(ours.feature_info, blocks_of(ours)))
    groups = [len(group_parameters(one, one.group_matcher())) for one in (model, ours)]
    assert groups[1] - groups[0] == len(blocks_of(ours)) - 4
    for parameter in ours.parameters():
        parameter.data.add_(0.1)
    again = grown(make(name, torch.float32))
    again.load_state_dict(ours.state_dict())
    expected = outputs(ours)
    torch.testing.assert_close(outputs(again), expected)
    torch.testing.assert_close(torch.compile(ours, backend="eager", fullgraph=True)(IMAGES), expected)
    ours.set_grad_checkpointing()
    ours.train()
    ours(IMAGES).sum().backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())
    ours.reset_classifier(3)
    assert ours(IMAGES).shape == (4, 3)


def test_stochastic_depth_is_spread_over_all_blocks():
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in blocks_of(grown(make("pooled")))]
    assert rates == pytest.approx([0.2 * i / 5 for i in range(6)])


@pytest.mark.parametrize("name", ["llama", "tied", "qwen3", "a classifier", "steps-transformer"])
def test_what_transformers_calls(name, tmp_path):
    ours = grown(make(name, torch.float32))
    for parameter in ours.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))  # also what is zero at the start
    expected = outputs(ours)
    ours.save_pretrained(tmp_path)
    auto = AutoModelForSequenceClassification if name == "a classifier" else AutoModelForCausalLM
    again = auto.from_pretrained(tmp_path).eval()
    assert type(again) is type(ours) and torch.equal(outputs(again), expected)
    assert again.config.to_diff_dict() == ours.config.to_diff_dict()
    states = ours(IDS, output_hidden_states=True).hidden_states
    assert len(states) == len(blocks_of(ours)) + 1 and {state.shape[-1] for state in states} == {
        ours.config.hidden_size
    }
    if name != "a classifier":
        tied = ours.get_output_embeddings().weight is ours.get_input_embeddings().weight
        assert tied == (name in ("tied", "steps-transformer"))
        text = IDS[:, :6]
        without = ours.generate(text, **HOW, use_cache=False, attention_mask=torch.ones_like(text))
        for cache in (None, "static"):
            found = ours.generate(text, **HOW, cache_implementation=cache, attention_mask=torch.ones_like(text))
            assert torch.equal(found, without)
    ours.train().gradient_checkpointing_enable()
    outputs(ours).sum().backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())


def test_the_settings_of_a_language_model_stay():
    """What a user has frozen, recomputes, or keeps in another type; as the path of timm, which copies the model."""
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=False)).eval()
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    model.bfloat16()
    model.model.rotary_emb.inv_freq = frequencies  # as from_pretrained leaves them
    model.model.norm.float()
    model.model.layers[3].mlp.float()
    model.model.embed_tokens.requires_grad_(False)
    model.model.norm.requires_grad_(False)
    model.lm_head.requires_grad_(False).float()
    grown = stepsnet.grow(model)
    assert grown.is_gradient_checkpointing
    (function,) = {
        id(f): f for m in grown.modules() if (f := getattr(m, "_gradient_checkpointing_func", None))
    }.values()
    assert function.keywords == {"use_reentrant": False, "preserve_rng_state": False}
    frozen = {name for name, parameter in grown.named_parameters() if not parameter.requires_grad}
    assert frozen == {"model.embed_tokens.weight", "model.norm.0.weight"}
    theirs = dict(model.named_parameters())
    for name, parameter in grown.named_parameters():
        if name.startswith("model.norm."):
            assert parameter.dtype == torch.float32
        elif name in theirs:
            assert parameter.dtype == theirs[name].dtype, name
    assert grown.model.layers[-1].mlp.up_proj.weight.dtype == torch.float32  # as in the last old layer
    assert torch.equal(grown.model.rotary_emb.inv_freq, frequencies)
    for name, new in stepsnet.stepify(model, steps=2).named_parameters():  # the same rule
        of_layer = name.startswith("model.layers.")
        assert (
            new.dtype
            == (model.model.layers[3].get_parameter(name.split(".", 3)[3]) if of_layer else theirs[name]).dtype
        )


def test_each_step_of_a_steps_transformer_keeps_its_frequencies_exact():
    model = make("steps-transformer", torch.bfloat16)
    for name, buffer in MODELS["steps-transformer"]().named_buffers():  # as from_pretrained leaves them
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, buffer)
    assert {buffer.dtype for name, buffer in grown(model).named_buffers() if "inv_freq" in name} == {torch.float32}


@pytest.mark.parametrize("name", ["vit", "tied", "qwen3"])
def test_what_a_frozen_network_gets_new_reaches_its_outputs(name):
    model = make(name).requires_grad_(False)
    ours = grown(model)
    norm = ours.norm if name == "vit" else ours.model.norm
    assert all(parameter.requires_grad for parameter in norm.parts[-1].parameters())
    trained = [parameter for parameter in ours.parameters() if parameter.requires_grad]
    assert 0 < len(trained) < len(list(ours.parameters()))
    with torch.no_grad():  # as an update may leave them
        for parameter in trained:
            parameter.add_(0.1 * torch.randn_like(parameter))
    new = outputs(ours)
    with torch.no_grad():
        norm.parts[-1].weight.zero_()
    assert not torch.allclose(outputs(ours), new)


def test_plans():
    vit = make("vit")
    assert (grown(vit, 3).blocks.widths, grown(vit, 3).blocks.depths) == ((48, 68, 96), (4, 2, 2))
    ours = grown(vit, plan={"widths": (48, 64), "depths": (4, 1), "num_heads": (3, 2)})
    assert ours.blocks[-1].attn.num_heads == 2 and len(ours.blocks) == 5
    assert grown(vit, plan=stepsnet.plan_steps(96, 4, 3, head_dim=16)).blocks.widths == (48, 68, 96)  # its first step
    assert grown(vit, round_to=8).blocks.widths == (48, 72 if 48 * 2**0.5 > 68 else 64)
    llama = grown(make("llama"), 3)  # whole heads of the same size
    assert llama.config.widths == [64, 96, 128] and [s["num_attention_heads"] for s in llama.config.step_sizes] == [
        4,
        6,
        8,
    ]
    drawn = grown(vit)
    assert drawn.pos_embed[..., 48:].std().item() == pytest.approx(vit.pos_embed.std().item(), rel=0.3)


def test_norms_by_slices():
    x = torch.randn(3, 7)
    ours = SliceNorm.like(nn.LayerNorm(7, elementwise_affine=False), [4, 3])
    expected = torch.cat([nn.functional.layer_norm(part, part.shape[-1:]) for part in x.split([4, 3], -1)], -1)
    torch.testing.assert_close(ours(x), expected)
    with pytest.raises(UserError, match="grow: got BatchNorm1d, expected a norm that holds only vectors"):
        SliceNorm.like(nn.BatchNorm1d(7), [4, 3])


def refused(pattern, model, *args, **options):
    with pytest.raises(UserError, match=pattern) as raised:
        stepsnet.grow(model, *args, **options)
    assert "\n" not in str(raised.value)


def test_bad_input_is_one_line():
    vit, llama = make("vit"), make("llama")
    refused("got ResNet, expected a VisionTransformer of timm", timm.create_model("test_resnet"))
    refused("got 'vit', expected a model", "vit")
    refused("is of the family 'opt', expected one of llama, qwen2", OPTForCausalLM(OPTConfig(**LLAMA, ffn_dim=8)))
    refused("steps: got 1, expected a whole number of at least 2", vit, 1)
    refused("steps: got 2, expected more than the 2", grown(vit), 2)
    refused("steps: got 200 new ones, which do not fit above width 48", vit, 201)
    refused("plan: widths: got 32 after 48, expected a wider one", vit, plan={"widths": (48, 32), "depths": (4, 2)})
    refused(r"plan: widths: got \(32, 48\), expected the first to be", vit, plan={"widths": (32, 48), "depths": (4, 2)})
    refused(r"plan: depths: got \(2, 2\), expected the first", vit, plan={"widths": (48, 64), "depths": (2, 2)})
    refused("num_heads: got 5 at width 64, expected a divisor", vit, plan=plan_of((48, 64), (3, 5)))
    refused("num_heads: got 5 at width 96, expected a positive multiple of 2", llama, plan=plan_of((64, 96), (4, 5)))
    refused("gives heads of even size, since rotary", make("untied"), plan=plan_of((64, 70), (4, 2)))
    refused("expected widths and depths", vit, plan={"widths": (48, 64)})
    refused("expected at least one more", vit, plan=plan_of((48,), (3,)))
    refused("round_to: got 0", vit, round_to=0)
    refused("round_to: got it together with a plan", vit, plan={"widths": (48, 64), "depths": (3, 1)}, round_to=16)
    refused(
        "head: got Identity, expected a Linear", timm.create_model("vit_tiny_patch16_224", **VIT | {"num_classes": 0})
    )

    class Normed(timm.models.VisionTransformer):
        def forward_head(self, x, pre_logits=False):
            return self.head(nn.functional.normalize(self.pool(x), dim=-1))

    refused("grow: Normed.forward_head: got a method of its own, expected timm's", Normed(**VIT))
    mapped = timm.create_model("vit_tiny_patch16_224", **VIT, class_token=False, global_pool="map")
    refused(r"VisionTransformer.attn_pool.latent: got a part that grow does not know", mapped)
    post = timm.create_model("vit_tiny_patch16_224", **VIT, block_fn=ResPostBlock)
    refused("blocks holds ResPostBlock, expected timm's Block", post)
    refused(
        r"grow: VisionTransformer.blocks: attn.lambda_q1: got a tensor",
        timm.create_model("vit_tiny_patch16_224", **VIT, attn_layer="diff"),
    )
    with pytest.raises(ValueError, match=r"norm_slices: got \[32\], expected a sum of 64"):
        StepsTransformerConfig(**OURS, norm_slices=[32])
    designed = StepsTransformerForCausalLM(StepsTransformerConfig(**OURS, residual="layer_scale"))
    refused("residual: got 'layer_scale', expected plain", designed)


def test_parts_outside_of_the_layers_are_as_their_configuration_makes_them():
    def refused_with(words, change, name="llama"):
        model = make(name)
        change(model)
        refused(words, model)

    def untie(model):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())

    def tie(model):
        model.lm_head.weight = model.model.embed_tokens.weight

    for words, change, name in (
        (r"LlamaForCausalLM\.lm_head\.weight is not as its configuration makes it", untie, "tied"),
        (r"LlamaForCausalLM\.lm_head\.weight is not as its configuration makes it", tie, "llama"),
        (r"lm_head\.bias is not as", lambda m: setattr(m, "lm_head", nn.Linear(64, 31)), "llama"),
        (r"lm_head\.weight is not as", lambda m: setattr(m, "lm_head", nn.Linear(64, 5, bias=False)), "llama"),
    ):
        refused_with(words, change, name)
    refused("grow: LlamaModel: got no head, expected a model with one, such as LlamaForCausalLM", make("llama").model)


def plan_of(widths, heads):
    return {"widths": widths, "depths": (4, 2)[: len(widths)], "num_heads": heads}


def test_a_model_that_ends_before_its_depths_is_refused():
    sizes = dict(widths=[32, 64], depths=[3, 2], num_attention_heads=[2, 4], vocab_size=50)
    model = StepsTransformerForCausalLM(StepsTransformerConfig(**sizes))
    assert stepsnet.grow(model)
    model.config.num_hidden_layers = 3
    with pytest.raises(UserError, match=r"grow: Steps.* has num_hidden_layers=3, expected the 5 layers of its depths"):
        stepsnet.grow(model)


def test_a_stream_of_a_design_is_not_grown():
    model = timm.create_model("test_vit")
    model.blocks = stepsnet.residual.connect(model.blocks, "lambdas")
    with pytest.raises(UserError, match="grow: a design of the residual stream joins the blocks, expected a model"):
        stepsnet.grow(model)
