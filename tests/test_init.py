"""``init``: what of other weights is copied into a model, what is resized, and what is left and said to be."""

import dataclasses

import pytest
import timm
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from test_from_data import write_images
from timm.layers import resample_abs_pos_embed
from torch import nn

import stepsnet
from stepsnet.errors import UserError
from stepsnet.models import load_baseline
from stepsnet.models.transfer import read_pretrained, start_from
from stepsnet.recipes import find_recipe
from stepsnet.run_folder.checkpoint import save_weights
from stepsnet.runs.prepare import prepare_run
from stepsnet.settings.config import ClassificationRecipe, ModelSpec
from stepsnet.settings.overrides import to_yaml

ONE_WIDTH = dict(widths=(64,), depths=(6,), num_heads=(2,))  # test_vit as a StepsNet of one step
SMALL = dict(img_size=32, num_classes=7)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def saved(tmp_path, model, name="weights.safetensors"):
    save_weights(tmp_path / name, model.state_dict())
    return str(tmp_path / name)


def cells(table):
    """{part: [copied, resized, left, why]} of a table as it is shown."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[3:]]
    return {row[0]: row[1:] for row in rows}


def test_the_last_blocks_of_one_width_become_the_last_step(tmp_path):
    vit = timm.create_model("test_vit", **SMALL)
    model = timm.create_model("test_steps_deit", **{**SMALL, "num_classes": 3})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    table = start_from(model, saved(tmp_path, vit))
    blocks, depth = len(vit.blocks), len(model.blocks.networks[2])
    for index, block in enumerate(model.blocks.networks[2]):
        theirs = vit.blocks[blocks - depth + index].state_dict()
        assert all(torch.equal(value, theirs[name]) for name, value in block.state_dict().items())
    for name in ("cls_token", "pos_embed", "patch_embed.proj.weight", "norm.bias"):
        assert torch.equal(model.state_dict()[name], vit.state_dict()[name])
    left = [name for name, value in model.state_dict().items() if torch.equal(value, before[name])]
    assert {"head.weight", "blocks.networks.0.0.attn.qkv.weight", "blocks.networks.1.1.mlp.fc1.weight"} <= set(left)
    rows = cells(table)
    first, last = rows["blocks, step 1, 32 wide"], rows["blocks, step 3, 64 wide"]
    assert first[:2] == ["", ""] and first[3] == "no such blocks in the source"
    assert last[0].endswith("k") and last[1:] == ["", "", ""]
    assert rows["head"] == ["", "", str(64 * 3 + 3), "3 classes, 7 in the source"]
    assert rows["pos_embed"][0] == str(5 * 64)


@pytest.mark.parametrize("into", ["timm's", "ours"])
def test_a_model_of_one_width_is_read_by_either_name(into, tmp_path):
    vit = timm.create_model("test_vit", **SMALL).eval()
    ours = timm.create_model("test_steps_deit", **SMALL, **ONE_WIDTH).eval()
    load_baseline(ours, vit.state_dict())
    source, target = (ours, timm.create_model("test_vit", **SMALL)) if into == "timm's" else (
        vit,
        timm.create_model("test_steps_deit", **SMALL, **ONE_WIDTH),
    )  # fmt: skip
    table = start_from(target, saved(tmp_path, source))
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(target.eval()(x), source(x))
    assert all(row[1:] == ["", "", ""] for row in cells(table).values())


def test_a_head_whose_classes_timm_may_have_ordered_in_its_way_is_told(tmp_path):
    """Where it is copied, and only from a file, which does not name its classes."""
    write_images(tmp_path / "images", (32, 32), classes=("1", "2", "10"))
    recipe = ClassificationRecipe(
        name="t", model=ModelSpec("test_vit", {"img_size": 32}), data=f"folder:{tmp_path / 'images'}", batch_size=4
    )
    for classes, count in ((3, 1), (5, 0)):
        file = saved(tmp_path, timm.create_model("test_vit", img_size=32, num_classes=classes))
        lines = prepare_run(dataclasses.replace(recipe, init=file)).lines
        assert sum(f"init: {file} does not name its classes: its output 1 is taken" in line for line in lines) == count


@pytest.mark.parametrize("family", ["test_steps_swin", "test_steps_resnet", "test_steps_swinpp"])
def test_stages_take_what_is_as_wide_and_the_same_model_all(family, tmp_path):
    model, same = timm.create_model(family, num_classes=5), timm.create_model(family, num_classes=5)
    start_from(same, saved(tmp_path, model))
    assert all(torch.equal(value, same.state_dict()[name]) for name, value in model.state_dict().items())
    baseline = timm.create_model(f"{family}_baseline", num_classes=5)
    rows = cells(start_from(model, saved(tmp_path, baseline)))
    stage = "layers.2.blocks" if "swin" in family else "layer3.1"
    widest = {part: row for part, row in rows.items() if part.startswith(stage)}
    assert [row[3] for row in widest.values()] == [*["no such blocks in the source"] * 2, ""]
    assert list(widest)[-1].endswith(f"step 3, {64 if 'swin' in family else 96} wide")
    assert rows["head" if "swin" in family else "fc"][3] == ""


def test_steps_of_other_depths_take_their_last_blocks(tmp_path):
    deep = timm.create_model("test_steps_deit", **SMALL)  # 4, 2 and 3 blocks
    model = timm.create_model("test_steps_deit", **SMALL, widths=(32, 48, 64), depths=(2, 3, 1), num_heads=(1, 2, 2))
    rows = cells(start_from(model, saved(tmp_path, deep)))
    for step, (mine, theirs) in enumerate(((1, 3), (2, 1), (0, 2))):
        ours = model.blocks.networks[step][mine].state_dict()
        others = deep.blocks.networks[step][theirs].state_dict()
        assert all(torch.equal(value, others[name]) for name, value in ours.items())
    assert rows["blocks, step 2, 48 wide"][3] == "only 2 such blocks in the source"
    assert rows["blocks, step 1, 32 wide"][3] == ""


@pytest.mark.parametrize(
    "name, size, path", [("test_vit", {"depth": 4}, "blocks"), ("convnext_atto", {}, "stages.2.blocks")]
)
def test_steps_of_stepify_take_their_own_blocks(name, size, path, tmp_path):
    """Their blocks are numbered through all steps, so that one more in a step moves none of the others."""
    sizes = size or dict(dims=(16, 32, 64, 64), depths=(1, 1, 4, 1))
    plain = timm.create_model(name, num_classes=7, **sizes)

    def in_steps(depths):
        plan = {"widths": (32, 48, 64), "depths": depths}
        return stepsnet.stepify(plain, plan=plan, **({} if size else {"stages": [3]}))

    deep, model = in_steps((3, 2, 2)), in_steps((4, 2, 1))
    start_from(model, saved(tmp_path, deep))
    theirs, ours = deep.get_submodule(path).blocks, model.get_submodule(path).blocks
    for mine, other in ((1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 6)):
        there = theirs[other].state_dict()
        assert all(torch.equal(value, there[key]) for key, value in ours[mine].state_dict().items())
    start_from(model, saved(tmp_path, plain))
    there = plain.get_submodule(path)[-1].state_dict()
    assert all(torch.equal(value, there[key]) for key, value in ours[6].state_dict().items())


def test_positions_windows_and_channels_are_resized(tmp_path):
    vit = timm.create_model("test_vit", img_size=64)
    for tokens in ({"class_token": True}, {"class_token": False, "global_pool": "avg"}):
        model = timm.create_model("test_vit", img_size=32, in_chans=1, num_classes=2, **tokens)
        table = start_from(model, saved(tmp_path, vit))
        expected = resample_abs_pos_embed(vit.pos_embed[:, 1:], [2, 2], num_prefix_tokens=0)
        assert torch.equal(model.pos_embed[:, -4:], expected)
        if tokens["class_token"]:
            assert torch.equal(model.pos_embed[:, :1], vit.pos_embed[:, :1])
        torch.testing.assert_close(model.patch_embed.proj.weight, vit.patch_embed.proj.weight.sum(1, keepdim=True))
        assert cells(table)["pos_embed"] == ["", str(model.pos_embed.numel()), "", ""]
    registers = timm.create_model("test_vit", img_size=32, reg_tokens=2)
    start_from(registers, saved(tmp_path, vit))  # behind the class's token
    assert torch.equal(registers.pos_embed[:, :1], vit.pos_embed[:, :1]) and not registers.pos_embed[:, 1:3].any()
    color = timm.create_model("test_vit", img_size=32)
    start_from(color, saved(tmp_path, model))  # from one channel to three, and to a class token
    grey = torch.randn(1, 1, 32, 32)
    torch.testing.assert_close(
        color.patch_embed(grey.expand(1, 3, 32, 32)), model.patch_embed(grey), rtol=1e-4, atol=1e-5
    )
    assert torch.equal(color.pos_embed[:, 1:], model.pos_embed) and not color.pos_embed[:, :1].any()
    swin = timm.create_model("test_steps_swin", window_size=4, img_size=128, num_classes=1000)
    start_from(swin, saved(tmp_path, timm.create_model("test_steps_swin")))
    assert swin(torch.randn(1, 3, 128, 128)).isfinite().all()


def test_on_the_meta_device_it_is_only_checked(tmp_path):
    source = saved(tmp_path, timm.create_model("test_vit", img_size=64))
    with torch.device("meta"):
        model = timm.create_model("test_vit", img_size=32, in_chans=1, class_token=False, global_pool="avg")
    assert "| pos_embed |" in start_from(model, source) and model.pos_embed.is_meta


@pytest.mark.parametrize("key", ["init", "backbone"])
def test_what_are_no_weights_is_one_line(key, tmp_path):
    vit = timm.create_model("test_vit", **SMALL).state_dict()
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save({"model": {"a": 3}}, tmp_path / "numbers.pth")
    torch.save(nn.Linear(2, 2), tmp_path / "module.pth")  # would run code of the file's choice
    torch.save({**vit, "norm.bias": torch.full((64,), float("nan"))}, tmp_path / "nan.pth")
    (tmp_path / "text.safetensors").write_text("this is a text")
    (tmp_path / "empty").mkdir()
    for name, expected in {
        "list.pth": "does not hold a dictionary",
        "numbers.pth": "holds a int under 'a', expected only weights, by name",
        "module.pth": "cannot read .*weights_only",
        "nan.pth": "norm.bias of .* is not finite",
        "text.safetensors": "cannot read",
        "empty": "has no weights yet",
        "nothing": "expected the folder of a run, a checkpoint file or timm:NAME",
    }.items():
        with pytest.raises(UserError, match=expected) as raised:
            read_pretrained(tmp_path / name, key)
        assert name == "empty" or str(raised.value).startswith(f"{key}: ")
    with pytest.raises(UserError, match=r"got timm:test_vitt, expected one of timm's pretrained models \(did you mean"):
        read_pretrained("timm:test_vitt", key)


def test_weights_of_another_kind_of_model_are_refused(tmp_path):
    model = timm.create_model("test_steps_deit", **SMALL)
    with pytest.raises(UserError, match="fits no layer of the model, expected weights of a model like it"):
        start_from(model, saved(tmp_path, timm.create_model("test_resnet")))
    with pytest.raises(UserError, match=r"init: got a .*dict, expected the folder of a run, a checkpoint file or"):
        start_from(model, dict(model.state_dict()))
    narrow = timm.create_model("test_vit", **SMALL, embed_dim=24, num_heads=1)
    with pytest.raises(UserError, match=r"cls_token: \(1, 1, 64\), \(1, 1, 24\) in the source"):
        start_from(model, saved(tmp_path, narrow))


def test_timms_pretrained_weights(tmp_path, monkeypatch):
    """Where timm would look for them in the network, a file stands."""
    vit = timm.create_model("test_vit", num_classes=1000)
    file = saved(tmp_path, vit)
    known = timm.models._registry._model_pretrained_cfgs
    tag = next(name for name in known if name.startswith("test_vit."))
    local = dataclasses.replace(known[tag], file=file, hf_hub_id=None, url="")
    for name in (tag, "test_vit"):
        monkeypatch.setitem(known, name, local)
    drawn = torch.get_rng_state()
    model = timm.create_model("test_steps_deit", num_classes=4, img_size=160)
    torch.set_rng_state(drawn)
    start_from(model, "timm:test_vit")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(model.patch_embed.proj.weight, vit.patch_embed.proj.weight)
    for name in (tag, "test_vit"):
        monkeypatch.setitem(known, name, dataclasses.replace(local, file=str(tmp_path / "gone.safetensors")))
    with pytest.raises(UserError, match=r"init: cannot load timm:test_vit \(.*\); expected a model that timm has"):
        start_from(model, "timm:test_vit")
    with pytest.raises(UserError, match="cannot load timm:test_steps_deit"):  # known to timm, and not pretrained
        start_from(model, "timm:test_steps_deit")


HALF = "mean (0.5, 0.5, 0.5) and std (0.5, 0.5, 0.5)"
IMAGENET = "mean (0.485, 0.456, 0.406) and std (0.229, 0.224, 0.225)"


def told_of_inputs(init, data, args=None):
    """What a run that starts from weights says besides the table."""
    recipe = find_recipe("cifar10/shallow")
    model = ModelSpec("test_steps_deit", {"img_size": 32, **(args or {})})
    recipe = dataclasses.replace(recipe, model=model, data=data, img_size=None, init=init, holdout=None)
    recipe = dataclasses.replace(recipe, batch_size=2, train_samples=None, device="cpu", clean_samples=0)
    lines = prepare_run(recipe).lines
    assert any(line.startswith(f"init from {init}\n|") for line in lines)
    return [line for line in lines if "trained on images normalized with" in line or "has not ended" in line]


def test_weights_that_have_seen_other_inputs_are_told(tmp_path, monkeypatch):
    """timm's augreg models were trained on images of mean 0.5, and ours take ImageNet's."""
    known = timm.models._registry._model_pretrained_cfgs
    tag = next(name for name in known if name.startswith("test_vit."))
    file = saved(tmp_path, timm.create_model("test_vit", num_classes=1000))
    data = f"folder:{write_images(tmp_path / 'data', (32, 32), classes=('ant', 'bee'))}"
    grey = f"folder:{write_images(tmp_path / 'grey', (32, 32), 'L', classes=('ant', 'bee'))}"

    def timms(mean, std):
        local = dataclasses.replace(known[tag], file=file, hf_hub_id=None, url="", mean=mean, std=std)
        for name in (tag, "test_vit"):
            monkeypatch.setitem(known, name, local)
        return "timm:test_vit"

    source = timms((0.5,) * 3, (0.5,) * 3)
    line = (
        f"init: the weights of {source} were trained on images normalized with {HALF}, but this run uses {IMAGENET}: "
    )
    line += "the same picture is a different input to them"
    assert told_of_inputs(source, data) == [line]
    (one,) = told_of_inputs(source, grey)
    assert f"with {HALF}, but this run uses mean (0.449) and std (0.226): " in one
    overlay = {"pretrained_cfg_overlay": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}}  # what the page names
    assert told_of_inputs(source, data, overlay) == []
    source = timms((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert told_of_inputs(source, data) == told_of_inputs(source, grey) == []
    assert told_of_inputs(file, data) == []  # nobody knows what a file's have seen


def test_a_run_that_has_seen_other_inputs_is_told(tmp_path, monkeypatch):
    data = f"folder:{write_images(tmp_path / 'data', (32, 32), classes=('ant', 'bee'))}"

    def run_of(name, data, **args):
        spec = ModelSpec("test_steps_deit", {"num_classes": 2, "img_size": 32, **args})
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(to_yaml(ClassificationRecipe(name=name, model=spec, data=data)))
        saved(tmp_path / name, timm.create_model(spec.name, **spec.args), "model.safetensors")
        return str(tmp_path / name)

    assert told_of_inputs(run_of("same", "folder:gone"), data) == []
    half = run_of("half", "folder:gone", pretrained_cfg_overlay={"mean": (0.5,) * 3, "std": (0.5,) * 3})
    assert (
        f"init: the weights of {half} were trained on images normalized with {HALF}, but"
        in told_of_inputs(half, data)[0]
    )
    digits = run_of("digits", "digits", img_size=8, patch_size=4, in_chans=1)
    images = load_digits().images / 16
    train, _ = train_test_split(images, test_size=0.2, random_state=0, stratify=load_digits().target)
    assert f"mean ({train.mean():.4g}) and std ({train.std():.4g}), but" in told_of_inputs(digits, data)[0]
    monkeypatch.setattr("stepsnet.run_folder.folder.how_far", lambda folder: "after update 1 of 9")
    same = str(tmp_path / "same")
    assert told_of_inputs(same, data) == [f"init: {same} has not ended: these are its weights after update 1 of 9"]
