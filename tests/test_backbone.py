"""Backbones of dense tasks: their maps are the classifier's, at any size, and they start from its weights."""

import copy
import math
import pickle

import pytest
import timm
import torch
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from timm.models.swin_transformer_v2_cr import SwinTransformerV2CrBlock
from timm.optim import param_groups_weight_decay
from torch import nn
from torchvision.models.swin_transformer import shifted_window_attention

import stepsnet  # noqa: F401 - registers the models
from stepsnet.errors import UserError
from stepsnet.models.backbone import STRIDES, create_backbone, load_backbone
from stepsnet.models.blocks import blocks_of
from stepsnet.models.build import build_model
from stepsnet.models.compilation import SharedDropPath, _share_stochastic_depth
from stepsnet.models.optimize import optimize
from stepsnet.models.windows import PaddedWindows, restore_windows
from stepsnet.run_folder.checkpoint import save_weights
from stepsnet.settings.config import ModelSpec

NAMES = ["test_steps_swin", "test_steps_swin_baseline", "test_steps_swinpp", "test_steps_resnet", "test_steps_deit"]
SWIN = {"embed_dim": 12, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 2, 2)}
PLAIN = {"embed_dim": 24, "depth": 4, "num_heads": 2}
SMALL = {
    "swin_tiny_patch4_window7_224": SWIN,
    "swinv2_tiny_window8_256": SWIN,
    "swinv2_cr_tiny_224": SWIN,
    "eva02_tiny_patch14_224": PLAIN,
    "vit_small_patch14_dinov2": PLAIN,
    "dla46x_c": {},  # adds maps of different strides, so it needs a multiple of 32
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", [*NAMES, "test_resnet", "test_vit", *SMALL])
def test_four_maps_of_an_image_of_any_size(name):
    backbone = create_backbone(name, **SMALL.get(name, {}))
    for height, width in ((64, 96), (75, 53), (33, 130)):
        maps = backbone(torch.randn(2, 3, height, width))
        for x, channels, stride in zip(maps, backbone.channels, STRIDES, strict=True):
            assert x.shape == (2, channels, math.ceil(height / stride), math.ceil(width / stride))
            assert x.isfinite().all()
    sum(x.sum() for x in maps).backward()
    unused = [name for name, parameter in backbone.named_parameters() if parameter.grad is None]
    assert unused == []  # DDP waits for every gradient


@pytest.mark.parametrize("name", ["test_steps_swin", "test_steps_resnet"])
def test_the_maps_are_the_classifiers(name):
    """At the size it is made for, with the LayerNorm written out."""
    torch.manual_seed(0)
    classifier = timm.create_model(name, always_partition=True) if "swin" in name else timm.create_model(name)
    backbone = create_backbone(name).eval()
    backbone.features.load_state_dict(
        {key.replace("layers.", "layers_"): value for key, value in classifier.state_dict().items()}, strict=False
    )
    x = torch.randn(1, 3, 224, 224)
    expected = classifier.eval().forward_intermediates(x, intermediates_only=True)[-4:]
    for got, other in zip(backbone(x), expected, strict=True):
        if "swin" in name:
            mean, var = other.mean(1, keepdim=True), other.var(1, keepdim=True, unbiased=False)
            other = (other - mean) / (var + 1e-5).sqrt()
        torch.testing.assert_close(got, other, rtol=1e-4, atol=1e-5)


RAW_STREAMS = {
    "caformer_s18": {},
    "convnext_atto": {},
    "davit_tiny": {"depths": (1, 1, 1, 1), "embed_dims": (8, 12, 16, 24), "num_heads": (1, 2, 2, 2)},
    "edgenext_xx_small": {},
    "focalnet_tiny_srf": {},
    "mambaout_femto": {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 24)},
    "mvitv2_tiny": {},
    "poolformerv2_s12": {},
    "swin_tiny_patch4_window7_224": SWIN,
    "twins_svt_small": {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 24), "num_heads": (1, 2, 2, 2)},
}


@pytest.mark.parametrize("name", RAW_STREAMS)
def test_a_residual_stream_without_a_norm_gets_one(name):
    backbone, x = create_backbone(name, **RAW_STREAMS[name]).eval(), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for parameter in backbone.features.parameters():  # branches that are scaled by 1e-6 at the start would not show
            parameter += 0.1 * torch.randn_like(parameter)
    for raw, got in zip(backbone.features(x), backbone(x), strict=True):
        stream = raw if backbone.channels_last else raw.permute(0, 2, 3, 1)
        assert stream.mean(-1).abs().max() > 1e-4  # nothing has normalised it
        expected = nn.functional.layer_norm(stream, stream.shape[-1:])
        torch.testing.assert_close(got.permute(0, 2, 3, 1), expected)


@pytest.mark.parametrize("name", ["test_resnet", "test_steps_resnet", "inception_next_atto", "pvt_v2_b0"])
def test_maps_of_batch_norms_and_maps_that_end_in_a_norm_stay_as_they_are(name):
    backbone, x = create_backbone(name).eval(), torch.randn(1, 3, 224, 224)  # which is not padded
    assert not any(key.startswith("norms") for key in backbone.state_dict())
    for raw, got in zip(backbone.features(x), backbone(x), strict=True):
        assert torch.equal(got, raw)
        if name == "pvt_v2_b0":
            torch.testing.assert_close(got.mean(1), torch.zeros_like(got[:, 0]), rtol=0, atol=1e-5)


def test_a_plain_model_is_resampled_to_the_strides():
    backbone = create_backbone("test_vit").eval()
    blocks = len(backbone.features.model.blocks)
    x = torch.randn(1, 3, 64, 64)
    streams = backbone.features.model.forward_intermediates(x, intermediates_only=True)
    assert len(streams) == blocks
    for index, (got, stride) in enumerate(zip(backbone(x), STRIDES)):
        stream = streams[math.floor(blocks * (index + 1) / 4) - 1]
        expected = nn.functional.layer_norm(stream.permute(0, 2, 3, 1), stream.shape[1:2]).permute(0, 3, 1, 2)
        if stride != 16:
            expected = nn.functional.interpolate(expected, (64 // stride,) * 2, mode="bilinear")
        torch.testing.assert_close(got, expected)


def test_how_a_trained_step_ends_is_trained_too():
    backbone = create_backbone("test_steps_deit", residual="attention_residuals", frozen_stages=2)
    trained = {name for name, parameter in backbone.named_parameters() if parameter.requires_grad}
    ends = [f"features.model.blocks.networks.{step}.wiring.query.w" for step in range(3)]
    assert [name in trained for name in ends] == [False, True, True]  # the second map is in the second step


@pytest.mark.parametrize("name", ["test_steps_swin", "test_steps_resnet", "test_steps_deit"])
def test_frozen_stages_and_norms_stay_as_they_are(name):
    norms = name == "test_steps_resnet"
    backbone = create_backbone(name, frozen_stages=2, frozen_norms=norms, drop_path_rate=0.5).train()
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    x = torch.randn(2, 3, 64, 64)
    optimizer = torch.optim.SGD([p for p in backbone.parameters() if p.requires_grad], lr=1.0)
    first = [[y.detach() for y in backbone(x)] for _ in range(2)]
    assert torch.equal(first[0][0], first[1][0]) and torch.equal(first[0][1], first[1][1])  # no stochastic depth
    sum(y.square().mean() for y in backbone(x)).backward()
    optimizer.step()
    changed = {key for key, value in backbone.state_dict().items() if not torch.equal(value, before[key])}
    behind = {"swin": ("layers_2", "layers_3"), "resnet": ("layer3", "layer4"), "deit": ("model.blocks.networks",)}
    behind = behind[name.rpartition("_")[2]]
    assert changed and all(key.removeprefix("features.").startswith((*behind, "norms")) for key in changed)
    if name == "test_steps_deit":  # 9 blocks in networks of 4, 2 and 3; the second map is behind the fourth
        assert not any("networks.0" in key for key in changed) and any("networks.1.0" in key for key in changed)
    if norms:
        statistics = [key for key in before if "running" in key]
        affine = [n for n, m in backbone.named_modules() if isinstance(m, nn.BatchNorm2d)]
        assert statistics and not changed & set(statistics)
        assert not changed & {f"{n}.weight" for n in affine}
    with pytest.raises(ValueError, match="frozen_stages: got 5, expected 0 to 4"):
        create_backbone(name, frozen_stages=5)


@pytest.mark.parametrize("name", ["test_steps_swin", "test_steps_deit"])
def test_norms_are_frozen_where_they_are_batch_norms(name):
    backbone = create_backbone(name, frozen_norms=True)  # as a run that has begun with it goes on
    with pytest.raises(UserError, match="frozen_norms: got true, expected false: this backbone has no batch norms"):
        backbone.check_frozen_norms()
    create_backbone("test_steps_resnet", frozen_norms=True).check_frozen_norms()
    create_backbone(name).check_frozen_norms()


def test_what_takes_a_frozen_parts_place_is_frozen():
    backbone = create_backbone("test_steps_swin", frozen_stages=2, drop_path_rate=0.5)
    _share_stochastic_depth(blocks_of(backbone))
    backbone.train()
    paths = [(name, m.training) for name, m in backbone.named_modules() if isinstance(m, SharedDropPath)]
    assert {training for name, training in paths if "layers_0" in name or "layers_1" in name} == {False}
    assert {training for name, training in paths if "layers_2" in name or "layers_3" in name} == {True}


def test_bias_tables_and_positions_are_exempt_from_decay():
    exempt = create_backbone("test_steps_swin").no_weight_decay()
    assert len(exempt) == 8 and all(name.endswith("relative_position_bias_table") for name in exempt)
    assert create_backbone("test_steps_deit").no_weight_decay() == {
        "features.model.pos_embed", "features.model.cls_token"
    }  # fmt: skip


def decayed(model):
    exempt = getattr(model, "no_weight_decay", set)()
    groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=exempt)
    chosen = {id(parameter) for group in groups if group["weight_decay"] for parameter in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


# SwinV2 exempts cpb_mlp.0.weight, Twins pos_block.0.proj.0.weight, XCiT pos_embed.*
@pytest.mark.parametrize("name", [*NAMES, "swinv2_tiny_window8_256", "twins_svt_small", "xcit_nano_12_p8_224"])
def test_what_the_classifier_decays_is_decayed_and_nothing_else(name):
    with torch.device("meta"):
        features, classifier = create_backbone(name, any_size=False), timm.create_model(name)
    names = {key.removeprefix("features.").removeprefix("model.") for key, _ in features.named_parameters()}
    found = {key.removeprefix("features.").removeprefix("model.") for key in decayed(features)}
    expected = {key if key in names else key.replace("layers.", "layers_") for key in decayed(classifier)}
    assert found == expected & names and all(key.startswith(("head", "fc", "cls_attn")) for key in expected - names)


@pytest.mark.parametrize("name", [*NAMES, "swinv2_tiny_window8_256", "eva02_tiny_patch14_224"])
def test_starts_from_a_classifier(name, tmp_path):
    args = SMALL.get(name, {})
    classifier = timm.create_model(name, num_classes=7, **args)
    save_weights(tmp_path / "model.safetensors", classifier.state_dict())
    torch.save({"state_dict": classifier.state_dict()}, tmp_path / "weights.pth")
    wanted = {
        key: value for key, value in classifier.state_dict().items() if not key.startswith(("head", "fc", "norm"))
    }
    for place in (tmp_path, tmp_path / "weights.pth", tmp_path / "model.safetensors"):
        backbone = create_backbone(name, **args)
        load_backbone(backbone, place)
        own = {
            k.removeprefix("model.").replace("layers_", "layers."): v for k, v in backbone.features.state_dict().items()
        }
        assert own.keys() == wanted.keys() and all(torch.equal(own[key], wanted[key]) for key in own)


def test_positions_of_another_size_are_interpolated(tmp_path):
    save_weights(tmp_path / "swin.safetensors", timm.create_model("test_steps_swin", window_size=7).state_dict())
    backbone = create_backbone("test_steps_swin", window_size=4)
    load_backbone(backbone, tmp_path / "swin.safetensors")
    assert backbone(torch.randn(1, 3, 64, 64))[3].isfinite().all()
    classifier = timm.create_model("test_vit")
    nn.init.constant_(classifier.pos_embed, 0.5)
    save_weights(tmp_path / "vit.safetensors", classifier.state_dict())
    other = create_backbone("test_vit", img_size=96)
    assert other.features.model.pos_embed.shape != classifier.pos_embed.shape
    load_backbone(other, tmp_path / "vit.safetensors")
    torch.testing.assert_close(
        other.features.model.pos_embed.data, torch.full_like(other.features.model.pos_embed, 0.5)
    )


def test_weights_that_do_not_fit_are_named(tmp_path):
    backbone = create_backbone("test_steps_swin")
    weights = timm.create_model("test_steps_swin").state_dict()
    cases = {
        "other": (timm.create_model("test_steps_resnet").state_dict(), "patch_embed.proj.weight is missing"),
        "short": (
            {k: v for k, v in weights.items() if "patch_embed.proj.bias" not in k},
            r"patch_embed.proj.bias is missing$",
        ),
        "more": ({**weights, "layers.0.blocks.networks.0.5.norm1.weight": torch.ones(16)}, "is not in the model"),
        "shape": ({**weights, "patch_embed.proj.bias": torch.ones(3)}, r"patch_embed.proj.bias of .* expected \(16,\)"),
    }
    for name, (saved, expected) in cases.items():
        save_weights(tmp_path / f"{name}.safetensors", saved)
        with pytest.raises(UserError, match=expected):
            load_backbone(backbone, tmp_path / f"{name}.safetensors")
    with pytest.raises(UserError, match="expected the folder of a run, a checkpoint file or timm:NAME"):
        load_backbone(backbone, tmp_path / "nothing")
    (tmp_path / "text.pth").write_text("this is a text")
    with pytest.raises(UserError, match="cannot read"):
        load_backbone(backbone, tmp_path / "text.pth")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no weights"):
        load_backbone(backbone, tmp_path / "empty")


def test_an_unknown_or_unsuitable_backbone():
    with pytest.raises(ValueError, match="expected a timm or StepsNet model"):
        create_backbone("swin_giant")
    with pytest.raises(ValueError, match=r"strides .*, expected \(4, 8, 16, 32\), or at least 4 maps of one stride"):
        create_backbone("test_steps_swin", patch_size=2)
    made_for_one_size = {"backbone": "beit_base_patch16_224", "backbone_args": {"embed_dim": 24, "depth": 4}}
    made_for_one_size["backbone_args"]["num_heads"] = 2
    for name in ("faster_rcnn", "upernet"):
        with pytest.raises(UserError) as raised:
            build_model(ModelSpec(name, {**made_for_one_size, "num_classes": 7}))
        assert "\n" not in str(raised.value) and str(raised.value) == (
            f"model {name}: backbone beit_base_patch16_224: got a model that refuses 331×245 pixels "
            "(Input height (336) doesn't match model (224).), expected one that takes images of any size"
        )


def swin_blocks(name, **arguments):
    """The second block of a stage shifts its windows."""
    kinds = (SwinTransformerBlock, SwinTransformerV2Block, SwinTransformerV2CrBlock)
    model = create_backbone(name, **arguments).eval()
    return model, [module for module in model.modules() if isinstance(module, kinds)]


def attend(block, x):
    return block._shifted_window_attn(x) if isinstance(block, SwinTransformerV2CrBlock) else block._attn(x)


@pytest.mark.parametrize("size", [(14, 21), (16, 25), (32, 14)])
def test_windows_that_do_not_divide_a_map_are_torchvisions(size):
    """As in the detectors of Swin's authors: padded, then shifted."""
    _, blocks = swin_blocks("swin_tiny_patch4_window7_224")
    for block in blocks[:2]:
        torch.nn.init.normal_(block.attn.relative_position_bias_table)
        x, attention = torch.randn(2, *size, 96), block.attn
        expected = shifted_window_attention(
            x,
            attention.qkv.weight,
            attention.proj.weight,
            attention._get_rel_pos_bias(),
            [7, 7],
            attention.num_heads,
            list(block.shift_size),
            qkv_bias=attention.qkv.bias,
            proj_bias=attention.proj.bias,
        )
        torch.testing.assert_close(attend(block, x), expected, rtol=1e-4, atol=1e-5)
        optimized = optimize(copy.deepcopy(block), compile=False)
        with torch.no_grad():
            torch.testing.assert_close(attend(optimized, x), expected, rtol=1e-4, atol=1e-5)
        assert type(restored := optimized.__dict__["_attn"].padded) is PaddedWindows and restored.block is optimized
        restore_windows(optimized)
        assert optimized.__dict__["_attn"] is restored


@pytest.mark.parametrize("name", ["swinpp_tiny_window7_224", "test_steps_swin", *(n for n in SMALL if "swin" in n)])
def test_opposite_edges_of_a_map_do_not_see_one_another(name):
    _, blocks = swin_blocks(name)
    of_shift = {any(block.shift_size): block for block in blocks}
    assert True in of_shift
    for block in of_shift.values():
        rows = block.window_size[0]
        x = torch.randn(1, 2 * rows + 2, 3 * rows - 1, block.attn.qkv.in_features)
        for edge in ((slice(None), 0), (slice(None), slice(None), 0)):
            other = x.clone()
            other[edge] += 3
            with torch.no_grad():
                moved = (attend(block, other) - attend(block, x)).abs().amax((0, 3))
            assert moved[:rows, :rows].max() > 1e-4
            assert moved[rows:, rows:].max() < 1e-6


def test_a_backbone_of_windows_is_copied_compiled_and_recomputed():
    model, _ = swin_blocks("test_steps_swin")
    x = torch.randn(1, 3, 72, 100)
    expected = [x.detach() for x in model(x)]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        next(model.parameters()).zero_()
    for got, other in zip(twin(x), expected, strict=True):
        torch.testing.assert_close(got, other)
    twin = pickle.loads(pickle.dumps(twin))
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for got, other in zip(compiled(x), expected, strict=True):
        torch.testing.assert_close(got, other)


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("efficientformer_l1", ("stages.2", "stages.3")),
        ("xcit_nano_12_p8_224", tuple(f"blocks.{i}." for i in range(6, 12))),
    ],
)
def test_what_runs_behind_frozen_stages_is_found_by_where_their_outputs_are(name, trained):
    with torch.device("meta"):
        backbone = create_backbone(name, frozen_stages=2, any_size=False)
    free = {key for key, one in backbone.features.named_parameters() if one.requires_grad}
    assert free == {
        key
        for key, _ in backbone.features.named_parameters()
        if key.startswith(tuple(f"model.{one}" for one in trained))
    }


@pytest.mark.parametrize("name", ["twins_svt_small", "mvitv2_tiny"])
def test_stages_whose_parts_are_not_known_are_not_frozen(name):
    """Twins has its embeddings in a list of their own, and timm names modules of MViT that it does not have."""
    expected = "expected 0: which modules run after .* is not known"
    with torch.device("meta"), pytest.raises(ValueError, match=expected):
        create_backbone(name, frozen_stages=2)
