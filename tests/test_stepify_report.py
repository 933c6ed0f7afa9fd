"""What stepify reports before anything is trained, and how the command line and recipes take it."""

import json

import pytest
import torch
from PIL import Image
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, RobertaConfig, RobertaModel

import stepsnet
from stepsnet.analysis.complexity import count_complexity
from stepsnet.analysis.memory import activation_bytes
from stepsnet.cli import _parser, main
from stepsnet.commands.options import recipe_and_folder
from stepsnet.errors import UserError
from stepsnet.models.blocks import step_sequences
from stepsnet.models.build import build_model
from stepsnet.recipes.any_model import stepify_pair, with_like_baseline
from stepsnet.settings.config import ModelSpec
from stepsnet.settings.overrides import override
from stepsnet.tasks.classification.task import build

VIT = dict(img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=3, num_classes=7)


def test_the_report_counts_both_models():
    report = stepsnet.describe_stepify("vit_tiny_patch16_224", 3, **VIT)
    torch.manual_seed(0)
    after = stepsnet.stepify("vit_tiny_patch16_224", 3, **VIT)
    counts = count_complexity(after, (3, 32, 32))
    assert (report.after.blocks, report.after.layers) == (counts.blocks, counts.layers)
    assert (report.after.params, report.after.macs) == (counts.params, counts.macs)
    assert report.after.activation_bytes == activation_bytes(after, (3, 32, 32), 1)
    assert report.before.blocks == 4 and report.before.layers == 5 * 4 + 2
    (stage,) = report.stages
    assert (stage.widths, stage.depths) == (after.blocks.widths, after.blocks.depths)
    assert "blocks (Block): 48×4 -> 24×" in str(report) and "MACs (G)" in str(report)
    (stream,) = report.streams
    assert stream.sigma > stream.branch > 0 and stream.suggested_scale is None


def test_a_small_stream_is_noticed():
    """The word embedding of a LLaMA of a usual width, and that the scale which is offered brings it to 1."""
    config = LlamaConfig(vocab_size=99, hidden_size=256, intermediate_size=704, num_hidden_layers=2)
    model = LlamaForCausalLM(config)
    report = stepsnet.describe_stepify(model, 2, tokens=16)
    (stream,) = report.streams
    assert stream.sigma == pytest.approx(0.02, rel=0.05) and stream.is_small and 48 <= stream.suggested_scale <= 52
    assert f"stream_scale={stream.suggested_scale:g} brings it to 1" in str(report)
    scaled = stepsnet.describe_stepify(model, 2, tokens=16, stream_scale=50.0)
    assert scaled.streams[0].sigma == pytest.approx(1.0, rel=0.05) and not scaled.streams[0].is_small
    (doubled,) = stepsnet.describe_stepify(model, 2, tokens=16, stream_scale=2.0).streams  # of too small a scale
    assert doubled.sigma == pytest.approx(0.04, rel=0.05) and doubled.suggested_scale == stream.suggested_scale
    assert report.before.blocks == 2 and report.after.layers == 8 * report.after.blocks + 1


def test_stages_and_statistics_of_batch_norms():
    """Each stage of several steps begins a stream; running statistics without data do not count."""
    args = dict(layers=(1, 3, 4, 1), channels=(16, 32, 48, 64), zero_init_last=False)
    report = stepsnet.describe_stepify("resnet18", 2, example=torch.randn(2, 3, 64, 64), **args)
    assert [stage.path for stage in report.stages] == [stream.path for stream in report.streams] == ["layer2", "layer3"]
    assert all(stream.branch > 0.1 for stream in report.streams)


class _Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(self.norm(x))


def _in_blocks(stem, block=_Block, width=64):
    torch.manual_seed(0)
    return nn.Sequential(stem, nn.Sequential(*(block(width) for _ in range(6))), nn.Linear(width, 2))


def test_the_stream_is_that_of_the_example():
    """Random numbers stand in for one that has a shape alone; of samples each row is one, whose cost is counted."""
    model, x = _in_blocks(nn.Linear(8, 64)), 100 * torch.randn(4, 9, 8)
    report = stepsnet.describe_stepify(model, 2, example=x)
    read = model[0](x)[..., : report.stages[0].widths[0]]  # by the first block
    assert report.streams[0].sigma == pytest.approx(read.std(-1).mean().item(), rel=1e-5)
    assert report.before.macs == 9 * (8 * 64 + 6 * (64 * 64 + 5 * 64) + 2 * 64) and not report.notes
    for alone in (torch.zeros(4, 9, 8), torch.full((4, 9, 8), torch.nan), x.to("meta")):
        (stream,) = stepsnet.describe_stepify(model, 2, example=alone).streams
        assert 0.4 < stream.sigma < 0.8


class _Diffusion(nn.Module):
    """Takes a time in 0 … 1, outside of which it has no square root."""

    def __init__(self):
        super().__init__()
        self.body = _in_blocks(nn.Linear(8, 64))

    def forward(self, x, time):
        return self.body(x * (1 - time).sqrt()[:, None])


class _Graph(nn.Module):
    """Nodes and edges; what it returns is a list."""

    def __init__(self):
        super().__init__()
        self.body = _in_blocks(nn.Linear(5, 64))
        self.embeddings, self.heads = nn.ModuleList([nn.Embedding(2, 5)] * 2), nn.ModuleList([nn.Linear(2, 2)] * 2)

    def forward(self, x, edges):
        y = self.body(torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]))
        return [head(y) for head in self.heads]


def test_examples_of_several_arguments():
    model, x, times = _Diffusion(), torch.randn(4, 8), torch.rand(4)
    report = stepsnet.describe_stepify(model, 2, example=(x, times))
    z = model.body[0](x * (1 - times).sqrt()[:, None])[..., : report.stages[0].widths[0]]
    assert report.streams[0].sigma == pytest.approx(z.std(-1).mean().item(), rel=1e-5)
    report = stepsnet.describe_stepify(_Graph(), 2, example=(torch.randn(50, 5), torch.randint(50, (2, 200))))
    assert report.before.blocks == 6 and report.streams[0].sigma > 0  # neither embeddings nor heads
    assert report.before.macs == 50 * (5 * 64 + 6 * (64 * 64 + 5 * 64) + 2 * 64 + 2 * 4)
    assert "those of the whole example: its first dimension, 50, does not count samples" in str(report)


class _Attention(_Block):
    """(N, B, C), as torch's own layers have it by default."""

    def forward(self, x):
        y = self.norm(x).transpose(0, 1)
        return x + self.linear(nn.functional.scaled_dot_product_attention(y, y, y).transpose(0, 1))


def test_times_that_attend_to_each_other_are_no_samples():
    """The cost of a block is matched where it is used, at 200 times and not at one."""
    model = _in_blocks(nn.Linear(5, 64), _Attention)
    report = stepsnet.describe_stepify(model, 2, example=torch.randn(200, 2, 5))
    of_block = 200 * (64 * 64 + 5 * 64 + 2 * 200 * 64)
    assert report.before.macs == 2 * (200 * (5 * 64 + 2 * 64) + 6 * of_block)
    assert report.after.macs == pytest.approx(report.before.macs, rel=0.05)


class _Table(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(self.norm(x))


@pytest.mark.parametrize("rows", [1, 16])
def test_batch_norms_of_one_value(rows):
    report = stepsnet.describe_stepify(_in_blocks(nn.Linear(9, 64), _Table), 2, example=torch.randn(rows, 9))
    assert report.streams[0].sigma > 0 and report.after.activation_bytes > report.before.activation_bytes > 0


def test_a_model_that_does_not_run_on_its_tokens_is_described_all_the_same(monkeypatch):
    """RoBERTa's positions begin behind the padding, so that there are fewer than its configuration says."""
    config = RobertaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=4, max_position_embeddings=20)
    config.num_attention_heads, config.intermediate_size = 4, 128
    assert stepsnet.describe_stepify(RobertaModel(config), 2).streams
    monkeypatch.setattr("stepsnet.models.build.context_of", lambda model: 20)  # of what nobody knows
    report = stepsnet.describe_stepify(RobertaModel(config), 2)
    assert not report.streams and report.after.blocks > report.before.blocks == 4
    assert "stream: not measured, since RobertaModel does not run (index" in str(report)


def test_layers_of_transformers_are_counted_in_one_step_too():
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes))
    report = stepsnet.describe_stepify(model, 1)
    assert report.before == report.after and report.before.blocks == 4


def test_the_original_is_scaled_and_joined_where_its_stepsnet_is():
    """Of a hierarchical model, some stages of which have fewer blocks than there are steps."""
    of_convnext = stepify_pair("convnext_atto", "digits")
    swin = [f"model.args.{one}" for one in ("img_size=64", "embed_dim=16", "depths=[1,1,3,1]", "num_heads=[1,1,2,2]")]
    of_swin = override(stepify_pair("swin_tiny_patch4_window7_224", "digits"), swin)
    scaled = "model.args.stream_scale=50"
    for pair, changes, containers in (
        (of_convnext, [scaled], [2]),
        (of_convnext, [scaled, "model.args.steps=1"], [0, 1, 2, 3]),
        (of_convnext, [scaled, "model.args.steps=2", "model.args.stages=[3,4]"], [2, 3]),
        (of_swin, ["model.args.residual=layer_scale"], [0, 1, 2, 3]),
        (of_swin, ["model.args.residual=layer_scale", "model.args.stages=[3]"], [2]),
        (of_swin, ["model.args.residual=layer_scale", scaled, "model.args.stages=[3]"], [2]),
    ):
        recipe = with_like_baseline(override(pair, changes), [one.split("=")[0] for one in changes])
        for spec in (recipe.model, recipe.baseline):
            found = step_sequences(build_model(spec))
            with_scale = [i for i, one in enumerate(found) if one.stream_scale != 1]
            joined = [i for i, one in enumerate(found) if one.wirings is not None]
            assert with_scale == (containers if scaled in changes else []), (spec, changes)
            assert joined == (containers if "model.args.residual=layer_scale" in changes else []), (spec, changes)
    with pytest.raises(UserError, match=r"model.args.stages: got none beside a stream_scale, .* such as \[3\]"):
        with_like_baseline(override(of_swin, [scaled, "model.args.residual=layer_scale"]), [])
    report = stepsnet.describe_stepify("convnext_atto", 3, stream_scale=0.01)
    assert report.stages_in_steps == (3,)
    assert "give the original the same scale, with steps=1 and stages=[3] (docs" in str(report)


def test_the_command(capsys):
    arguments = [f"{key}={value}" for key, value in VIT.items()]
    assert main(["stepify", "vit_tiny_patch16_224", *arguments, "--steps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stages"][0]["widths"] == [34, 48] and found["streams"][0]["path"] == "blocks"
    assert main(["stepify", "vit_tiny_patch16_224", *arguments, "--widths", "16,48", "--depths", "2,3"]) == 0
    assert "48×4 -> 16×2, 48×3" in capsys.readouterr().out
    for wrong, said in (
        (["vit_tiny_patch16_224", "img_size"], "model: got 'img_size', expected key=value"),
        (["convnext_ato"], "did you mean convnext_atto"),
        (["vgg11"], "VGG has no container of blocks of one kind"),
    ):
        assert main(["stepify", *wrong]) == 2
        assert said in capsys.readouterr().err


def test_a_pair_of_any_model_as_a_recipe(tmp_path, capsys):
    """`stepsnet compare --model`: both models take the data's images, and the recipe can be changed as any other."""
    for split in ("train", "val"):
        for name in ("a", "b"):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for index in range(4):
                Image.new("RGB", (40, 32), (index * 50, 100, 50)).save(folder / f"{index}.jpg")
    data = f"folder:{tmp_path}"
    line = ["compare", "--model", "timm:convnext_atto", "--data", data, "batch_size=4", "model.args.steps=2"]
    options, rest = _parser().parse_known_args(line)
    options.overrides += rest
    recipe, folder = recipe_and_folder(options)
    assert recipe.batch_size == 4 and recipe.model.args == {"model": "convnext_atto", "steps": 2}
    assert recipe.baseline.name == "convnext_atto" and str(folder) == "runs/stepify-convnext_atto"
    assert recipe.data == data
    # an argument of the model is both models', and so is a scale of the stream; what is said of the baseline is its own
    options.overrides += ["model.args.patch_size=2", "model.args.stream_scale=3", "baseline.args.num_classes=7"]
    recipe, _ = recipe_and_folder(options)
    assert recipe.model.args == {"model": "convnext_atto", "steps": 2, "patch_size": 2, "stream_scale": 3}
    one_step = {"model": "convnext_atto", "steps": 1, "stream_scale": 3}
    assert recipe.baseline == ModelSpec("stepify", {**one_step, "num_classes": 7, "patch_size": 2})
    of_vit = stepify_pair("vit_tiny_patch16_224", data)
    one_step = {"model": "vit_tiny_patch16_224", "steps": 1}
    for changes, expected in (
        (["model.args.stream_scale=1"], None),
        (["model.args.residual=mhc", "model.args.residual_options.streams=2"], {"residual_options": {"streams": 2}}),
        (["model.args.residual=mhc", "baseline.args.residual_options.streams=8"], {"residual_options": {"streams": 8}}),
        (["model.args.residual=mhc", "baseline.args.residual=plain"], {"residual": "plain"}),
        (["model.args.residual_options.streams=2", "baseline.args.residual=laurel"], {"residual": "laurel"}),
    ):
        baseline = with_like_baseline(override(of_vit, changes), [one.split("=")[0] for one in changes]).baseline
        in_design = None if expected is None else ModelSpec("stepify", {**one_step, "residual": "mhc", **expected})
        assert baseline == (in_design or ModelSpec("vit_tiny_patch16_224"))
    sized = override(of_vit, ["model.args.img_size=64"])
    both = with_like_baseline(sized, ["img_size", "model.args.img_size"])  # a key of the recipe is not one of the model
    assert both.baseline.args == {"img_size": 64}
    recipe = override(stepify_pair("convnext_atto", data), ["batch_size=4", "img_size=64"])
    for key, one in (("model", recipe), ("baseline", recipe)):
        one = override(one, [f"{key}.args.num_classes=2"])
        model, task = build(one if key == "model" else one.of_baseline())
        (batch,) = [task.example_batch(torch.device("cpu"))]
        loss, _ = task.loss(model.eval(), batch)
        assert batch[0].shape[1:] == (3, 64, 64) and loss.isfinite()
    assert stepify_pair("convnext_atto", "digits").augment is None  # which take none
    assert main(["compare", "--model", "convnext_atto"]) == 2
    assert "--data: got none with --model convnext_atto" in capsys.readouterr().err
    assert main(["compare", "digits/tiny", "--model", "convnext_atto", "--data", data]) == 2
    assert "got convnext_atto beside the recipe digits/tiny" in capsys.readouterr().err
    assert main(["compare"]) == 2
    assert "recipe: got none" in capsys.readouterr().err


def test_a_design_is_described_with_its_cost_and_the_plain_stream(capsys):
    args = dict(img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=3, num_classes=7)
    plain = stepsnet.describe_stepify("vit_tiny_patch16_224", 2, **args)
    ours = stepsnet.describe_stepify("vit_tiny_patch16_224", 2, residual="laurel", residual_options={"rank": 2}, **args)
    blocks = zip(plain.stages[0].widths, plain.stages[0].depths)
    added = sum(2 * depth * 2 * 2 * width for width, depth in blocks)  # A and B of each branch, of rank 2
    assert ours.stages == plain.stages and ours.streams == plain.streams
    assert ours.after.params - plain.after.params == added and ours.after.macs > plain.after.macs
    line = ["stepify", "vit_tiny_patch16_224", *(f"{key}={value}" for key, value in args.items()), "--steps", "2"]
    assert main([*line, "--residual", "laurel", "--residual-options", "rank=2"]) == 0
    said = capsys.readouterr().out
    assert said.strip() == str(ours) and "design of each stream: laurel, rank=2" in said
    assert main([*line, "--residual", "laurel", "--residual-options", "ranks=2"]) == 2
    assert "laurel got the option 'ranks', expected rank" in capsys.readouterr().err
    assert main([*line, "residual=laurel"]) == 2
    assert "expected the option --residual" in capsys.readouterr().err


def test_a_model_and_a_design_of_ones_own_are_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_my_own.py").write_text(
        "import timm\nfrom timm.models import register_model\nimport stepsnet.residual\n\n@register_model\n"
        "def my_small_vit(**kwargs):\n"
        "    return timm.create_model('vit_tiny_patch16_224', **{'embed_dim': 48, 'depth': 4, **kwargs})\n"
    )
    assert main(["stepify", "my_small_vit", "img_size=32", "--import", "of_my_own"]) == 0
    assert "blocks (Block): 48×4" in capsys.readouterr().out
    assert main(["models", "--import", "nothing_of_mine"]) == 2
    assert "import: found no module 'nothing_of_mine'" in capsys.readouterr().err
