"""A run as a repository: loaded by timm, transformers and stepsnet from the folder, and what its card says."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import yaml
from coco_images import write_coco
from detection_tasks import tiny
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.utils import filter_repo_objects
from PIL import Image
from run_folders import closed
from segmentation_tasks import tiny_recipe
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer, PreTrainedTokenizerFast

import stepsnet
from stepsnet.cli import main
from stepsnet.errors import UserError
from stepsnet.models.build import build_model
from stepsnet.output.redact import public_command, public_value
from stepsnet.publish.repository import WRITTEN, write_repository
from stepsnet.recipes import find_recipe
from stepsnet.run_folder.checkpoint import save_weights, untied
from stepsnet.run_folder.folder import read_run_recipe
from stepsnet.settings.config import ClassificationRecipe, ModelSpec
from stepsnet.settings.overrides import override, read_recipe, to_yaml
from stepsnet.tasks.class_names import save_classes
from stepsnet.tasks.classification.data import evaluation_transform
from stepsnet.tasks.classification.task import input_spec
from stepsnet.tasks.language.assets import save_assets
from stepsnet.tasks.language.data import load_text
from stepsnet.tasks.publication import publish_run_folder

ROTARY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
ROTARY |= {"num_key_value_heads": 2}
COUNTS = {"blocks": 3, "layers": 17, "params": 58_634, "macs": 976_660}
ORIGIN = {
    "command": "stepsnet train mine.yaml data=folder:cats --run runs/a",
    "commit": "0123456789ab",
    "hardware": {"cpu": "AMD EPYC", "cores": 2, "threads": 1, "memory_gib": 24, "gpu": None},
    "versions": {"python": "3.11.7", "torch": "2.15.0"},
}


def finished(folder, recipe, seed=0, **metrics):
    """The folder of a run as training leaves it, with random weights."""
    recipe = override(recipe, [f"seed={seed}"])
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(recipe))
    torch.manual_seed(seed)
    model = build_model(recipe.model)
    save_weights(folder / "model.safetensors", untied(model, model.state_dict()))
    summary = {"recipe": recipe.name, "label": "StepsNet", "seed": seed, "epochs": 2, "lr": 0.004, "batch_size": 128}
    summary |= {"widths": [24, 34, 48], **COUNTS, **ORIGIN, "seconds": 240.1, "ranks": 1, "metrics": metrics}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def classifier(folder, name, classes=("cat", "dog", "gnu"), seed=0, **args):
    args = {"num_classes": len(classes), **args}
    spec = {"name": "mine/cats", "task": "classification", "data": "folder:/home/somebody/cats"}
    run = finished(folder, ClassificationRecipe(**spec, model=ModelSpec(name, args)), seed, val_top1=60.0 + seed)
    save_classes(run, classes)
    return run


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("test_steps_deit", {}),
        ("test_steps_deit", {"img_size": 32, "in_chans": 1, "residual": "layer_scale"}),
        ("test_steps_resnet", {}),
        ("test_steps_swin", {}),
        ("test_vit", {}),
    ],
)
def test_timm_loads_a_classifier_with_its_preprocessing(name, args, tmp_path):
    run = classifier(tmp_path / "run", name, **args)
    assert main(["push", str(run), "--out", str(tmp_path / "out")]) == 0
    again = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    ours, recipe = stepsnet.load(run).model, stepsnet.load(run).recipe
    spec = input_spec(recipe, ours)
    images = torch.randn(2, *spec.input_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(again(images), ours(images))
    of_transformers = AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(of_transformers(images).logits, ours(images))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["label_names"] == ["cat", "dog", "gnu"] and config["pretrained_cfg"]["license"] is None
    assert again.pretrained_cfg["label_names"] == ["cat", "dog", "gnu"]
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(again), is_training=False)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8))
    read = evaluation_transform(recipe.data, spec)
    assert torch.equal(transform(picture.convert(spec.mode)), read(picture))
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("import stepsnet  # registers the model with timm" in card) == (name != "test_vit")
    # it is a run's folder too
    published = stepsnet.load(tmp_path / "out")
    assert published.predict(picture) == stepsnet.load(run).predict(picture)
    assert published.recipe.data == "folder:cats"


def test_timm_loads_it_from_the_hub(tmp_path, monkeypatch):
    """Where the hub's client downloads from is replaced by the folder."""
    out = tmp_path / "out"
    write_repository(classifier(tmp_path / "run", "test_steps_deit"), out)
    monkeypatch.setattr("timm.models._hub.hf_hub_download", lambda repo_id, filename, **_: str(out / filename))
    model = timm.create_model("hf-hub:me/cats", pretrained=True)
    weights = stepsnet.load(tmp_path / "run").model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_digits_have_their_own_preprocessing(tmp_path):
    recipe = closed(find_recipe("digits/tiny"))
    run = finished(tmp_path / "run", recipe, val_top1=60.0)
    save_classes(run, tuple("0123456789"))
    write_repository(run, tmp_path / "out")
    again = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(again), is_training=False)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 32), dtype=np.uint8))
    model = stepsnet.load(run).model
    read = evaluation_transform("digits", input_spec(recipe, model))
    assert transform(picture).numpy() == pytest.approx(read(picture).numpy(), abs=1e-5)


def language(folder, *changes):
    recipe = override(find_recipe("python-docs/tiny"), [*changes, "vocab_size=280", "seq_len=16"])
    run = finished(folder, recipe, val_perplexity=120.0, val_loss=4.8)
    save_assets(build_model(recipe.model), load_text("python-docs", "bpe", 280).tokenizer, run)
    return run


def of_transformers(folder, name, **args):
    """A run of a model by its type."""
    return language(folder, f"model.name={name}", f"model.args={json.dumps({**args, 'vocab_size': 280})}")


@pytest.fixture
def language_run(tmp_path, session_cache):
    args = {"widths": [16, 32], "depths": [1, 1], "num_attention_heads": [2, 2], "vocab_size": 280}
    return language(tmp_path / "run", *(f"model.args.{key}={json.dumps(value)}" for key, value in args.items()))


def test_transformers_loads_a_language_model(language_run, tmp_path):
    assert main(["push", str(language_run), "--out", str(tmp_path / "out")]) == 0
    model, tokenizer = (auto.from_pretrained(tmp_path / "out") for auto in (AutoModelForCausalLM, AutoTokenizer))
    run = stepsnet.load(language_run)
    tokens = tokenizer("The expression", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(model(**tokens).logits, run.model(**tokens).logits)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id == end
    greedy = model.generate(**tokens, max_new_tokens=8, do_sample=False)
    text = run.predict("The expression", max_new_tokens=8, temperature=0.0)["text"]
    assert tokenizer.decode(greedy[0], skip_special_tokens=True) == text
    assert stepsnet.load(tmp_path / "out").predict(["The", "A"], max_new_tokens=4) == run.predict(
        ["The", "A"], max_new_tokens=4
    )
    # the tokenizer needs no code of ours, which is why AutoTokenizer's question does not matter to it
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")("The").input_ids == tokenizer("The").input_ids
    card = (tmp_path / "out" / "README.md").read_text()
    assert "asks whether to run custom code" in card and "validation perplexity | 120.00" in card


def test_the_card_of_a_model_of_transformers_own_needs_no_code_of_ours(tmp_path, session_cache):
    run = of_transformers(tmp_path / "run", "causal_lm", model_type="llama", **ROTARY)
    assert main(["push", str(run), "--out", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "import stepsnet" not in card and "custom code" not in card and "AutoModelForCausalLM" in card
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "out")).__module__.startswith("transformers.")


def test_a_card_says_where_auto_tokenizer_is_wrong(tmp_path, session_cache):
    """transformers makes Qwen's kind of tokenizer of every folder of type qwen2."""
    run = of_transformers(tmp_path / "run", "causal_lm", model_type="qwen2", **ROTARY)
    trained_on = load_text("python-docs", "bpe", 280).tokenizer
    assert main(["push", str(run), "--out", str(tmp_path / "out")]) == 0
    text, card = "def f(x):\n    return  x", (tmp_path / "out" / "README.md").read_text()
    expected = trained_on.encode(text).ids
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text).input_ids != expected  # else the note can go
    assert "AutoTokenizer` makes a different tokenizer" in card and "PreTrainedTokenizerFast.from_pretrained" in card
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")(text).input_ids == expected


@pytest.mark.parametrize("model", ["steps_transformer", "steps_gpt2"])
def test_what_was_loaded_by_remote_code_is_saved_and_loaded_again(model, language_run, tmp_path, session_cache):
    """In programs that do not import stepsnet, as the card says; a fine-tuning saves the model so."""
    run = language_run
    if model == "steps_gpt2":
        args = {"model": "causal_lm", "model_type": "gpt2", "n_embd": 16, "n_layer": 4, "n_head": 2, "steps": 2}
        run = of_transformers(tmp_path / "made", "stepify", **args)
    write_repository(run, tmp_path / "one")
    code = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
model.save_pretrained(sys.argv[2])
print(model(input_ids=torch.arange(8)[None]).logits.sum().item())
"""
    said = []
    for one, other in (("one", "two"), ("two", "three")):
        folders = (str(tmp_path / one), str(tmp_path / other))
        said.append(subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, check=True))
    assert said[0].stdout == said[1].stdout
    names = {path.name for path in (tmp_path / "three").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "modeling_stepsnet.py"}


def test_a_push_knows_all_files_that_it_writes(language_run, tmp_path):
    """Of a language model; the upload's test has those of a classifier."""
    write_repository(language_run, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert set(filter_repo_objects(names, allow_patterns=list(WRITTEN))) == names


def test_what_no_other_library_loads_is_a_folder_that_predict_takes(tmp_path, camvid):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))
    detector = finished(tmp_path / "detector", tiny(write_coco(tmp_path / "coco")), val_box_ap=10.0)
    categories = [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}]
    (detector / "categories.json").write_text(json.dumps(categories))
    made = classifier(tmp_path / "made", "stepify", model="test_vit", steps=2)  # timm has no name for it
    segmenter = finished(tmp_path / "segmenter", tiny_recipe(camvid), val_miou=20.0)
    save_classes(segmenter, ["sky", "road", "tree"])
    for run in (detector, segmenter, made):
        out = tmp_path / f"{run.name}-out"
        assert main(["push", str(run), "--out", str(out)]) == 0
        expected = stepsnet.load(run).predict(picture)
        assert stepsnet.load(out).predict(picture) == expected and expected
        assert ModelCard.load(out / "README.md").data.library_name == "stepsnet"


def test_the_card_is_made_from_the_run_and_its_seeds(tmp_path):
    for seed in (0, 1, 2):
        classifier(tmp_path / f"seed{seed}", "test_vit", seed=seed)
    classifier(tmp_path / "other", "test_vit", classes=("a", "b"), seed=9)  # of another model
    out = tmp_path / "out" / "cats"
    assert main(["push", str(tmp_path / "seed1"), "me/cats", "--out", str(out), "--license", "mit"]) == 0
    card = ModelCard.load(out / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag, card.data.license) == (
        "timm",
        "image-classification",
        "mit",
    )
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("accuracy", 61.0, "folder:cats")
    for said in (
        'timm.create_model("hf-hub:me/cats", pretrained=True)',
        "| validation top-1 accuracy | 61.0% | 61.0 ± 1.0% |",
        "The seeds are 0, 1, 2; these weights are those of seed 1.",
        "`stepsnet train mine.yaml data=folder:cats --run runs/a`",
        "commit of stepsnet: 0123456789ab",
        "cpu: AMD EPYC, cores: 2, threads: 1, memory in GiB: 24; 4 min 00 s in 1 process",
        "The weights are under mit.",
    ):
        assert said in card.text, said
    assert "\n\n\n" not in card.content
    settings = re.search(r"```yaml\n(.*?)```", card.text, re.DOTALL)[1]
    assert yaml.safe_load(settings) == yaml.safe_load((out / "config.yaml").read_text())
    alone = tmp_path / "alone"
    assert main(["push", str(tmp_path / "other"), "--out", str(alone)]) == 0
    text = (alone / "README.md").read_text()
    assert "one seed, 9" in text and "None is stated for these weights" in text and "hf-hub:USER/alone" in text
    modes = {path.stat().st_mode for path in (*out.iterdir(), *alone.iterdir())}
    assert len(modes) == 1  # the weights too are for whoever may read the card


@pytest.mark.usefixtures("own_registrations")
def test_nothing_of_the_runs_beside_it_is_imported_for_a_card(tmp_path):
    """Nobody has named them; and a card tells that whoever loads the repository runs what its recipe names."""
    for name in ("my_mine", "my_theirs"):
        (tmp_path / f"{name}.py").write_text("")
    for seed, module in ((0, "my_mine"), (1, "my_mine"), (2, "my_theirs")):
        file = classifier(tmp_path / f"seed{seed}", "test_vit", seed=seed) / "config.yaml"
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"import": module, "import_from": ".."}))
    summary = json.loads((tmp_path / "seed0" / "summary.json").read_text())
    summary["command"] = "stepsnet train mine.yaml --run caf\udce9"  # a folder's name that is no UTF-8
    (tmp_path / "seed0" / "summary.json").write_text(json.dumps(summary))
    before = sys.modules.keys() | set()
    assert main(["push", str(tmp_path / "seed0"), "--out", str(tmp_path / "out")]) == 0
    assert {name for name in sys.modules.keys() - before if name.startswith("my_")} == {"my_mine"}
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "The seeds are 0, 1; these weights are those of seed 0." in text and r"--run 'caf\udce9'`" in text
    assert "stepsnet runs the code of that module, even if it lies in this repository: read it first.\n" in text


def test_a_model_of_a_folder_is_published_with_its_own_name(tmp_path):
    """Nobody else has the folder; what is made of such a model has no name that others can build."""
    timm.models.save_for_hf(timm.create_model("test_vit", depth=2, num_classes=3), str(tmp_path / "mine"))
    run = classifier(tmp_path / "run", f"local-dir:{tmp_path / 'mine'}")
    made = classifier(tmp_path / "made", "stepify", model=f"local-dir:{tmp_path / 'mine'}", steps=2)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))
    expected = stepsnet.load(run).predict(picture)
    assert main(["push", str(run), "--out", str(tmp_path / "out")]) == 0
    with pytest.raises(
        UserError, match=r"push: stepify was made from local-dir:.*, a folder on this machine without which"
    ):
        write_repository(made, tmp_path / "refused")
    (tmp_path / "mine").rename(tmp_path / "gone")
    published = stepsnet.load(tmp_path / "out")
    assert published.recipe.model.name == "test_vit" and published.predict(picture) == expected
    assert "The model is `test_vit`" in (tmp_path / "out" / "README.md").read_text()
    timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)


@pytest.mark.parametrize(
    ("split", "listed", "row"),
    [
        ("", "validation", "| validation top-1 accuracy | 60.0%"),
        ("@test", "test", "| test top-1 accuracy | 60.0%"),
        ("@train", None, "| training top-1 accuracy, as evaluated | 60.0%"),
    ],
)
def test_the_card_says_which_split_was_scored(split, listed, row, tmp_path):
    run = classifier(tmp_path / "run", "test_vit")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("/home/somebody/cats", f"/home/somebody/cats{split}"))
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"samples": {"train": 16, "evaluated": 8}, "undecodable": 2}
    (run / "summary.json").write_text(json.dumps(summary))
    assert main(["push", str(run), "--out", str(tmp_path / "out")]) == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    found = card.data.eval_results or []
    assert [(one.dataset_name, one.dataset_split) for one in found] == ([("folder:cats", listed)] if listed else [])
    assert row in card.text and "On `folder:cats`, 16 samples" in card.text
    assert "at least 2 of these could not be decoded and were left out:" in card.text


def test_the_card_says_where_the_number_of_ranks_changed(tmp_path):
    run = classifier(tmp_path / "run", "test_vit")
    summary = json.loads((run / "summary.json").read_text())
    part = {key: ORIGIN[key] for key in ("commit", "hardware", "versions")}
    of_earlier = [{"until_update": 4, **part, "ranks": 8}, {"until_update": 6, **part, "ranks": 1}]  # of a version
    parts = [(0, 2, 8, "a"), (2, 4, 8, "b"), (4, 6, 1, "a"), (8, 12, 2, "a"), (14, 15, 2, "a")]
    before = [
        {"from_update": begun, "until_update": until, **part, "ranks": ranks, "commit": commit}
        for begun, until, ranks, commit in parts
    ]
    later = "until update 4 in 8, updates 9 to 12 in 2, update 15 in 2"
    for number, (given, said) in enumerate(((of_earlier, "until update 4 in 8"), (before, later))):
        (run / "summary.json").write_text(json.dumps(summary | {"trained_before": given}))
        assert main(["push", str(run), "--out", str(tmp_path / str(number))]) == 0
        assert f"in 1 process, {said}\n- versions" in (tmp_path / str(number) / "README.md").read_text()


def test_nothing_says_where_the_run_was(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "host-of-somebody")
    monkeypatch.setenv("HOME", str(tmp_path / "home-of-somebody"))
    run = classifier(tmp_path / "secret-place" / "run", "test_vit")
    (tmp_path / "my_module.py").write_text("")
    changes = [f"data=folder:{tmp_path}/cats@test", "import=my_module", f"import_from={tmp_path}", "tracker=wandb"]
    recipe = override(read_recipe(run / "config.yaml"), [*changes, "device=cpu"])
    (run / "config.yaml").write_text(to_yaml(recipe))
    out = tmp_path / "out"
    write_repository(run, out)
    assert main(["push", str(run), "me/cats", "--out", str(tmp_path / "again")]) == 0
    for path in (*out.iterdir(), *(tmp_path / "again").iterdir()):
        if path.suffix != ".safetensors":
            text = path.read_text()
            for secret in (str(tmp_path), "secret-place", "somebody", "wandb"):
                assert secret not in text, (path, secret)
    assert read_recipe(out / "config.yaml").data == "folder:cats@test"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("folder:/home/me/My Cats", "folder:My Cats"),
        ("~/data/cats/", "cats"),
        ("text:../../private/book.txt", "text:book.txt"),
        ("C:\\Users\\me\\cats", "cats"),
        ("wds:https://me:password@host/a.tar", "wds:URL"),
        ("./../../home/me/x", "x"),
        ("data/../../me/cats", "cats"),
        ("folder:./../cats@test", "folder:cats@test"),
        ("/home/me/a,b/c", "c"),
        ("a.py,/home/me/b.py", "a.py,b.py"),
        ("[/home/me/my_module.py]", '["my_module.py"]'),
        ('{"checkpoint_path": "/home/me/w.pth", "depth": 2}', '{"checkpoint_path": "w.pth", "depth": 2}'),
        ('{"a": [{"b": "~/w.pth"}]}', '{"a": [{"b": "w.pth"}]}'),
        ("[24, 34, 48]", "[24, 34, 48]"),
        ("[ of /home/me", "…"),
        ("data/cats", "data/cats"),
        ("hfds:me/cats", "hfds:me/cats"),
        ("digits/tiny", "digits/tiny"),
        ("Sec. 5.3: 24 / 48 blocks", "Sec. 5.3: 24 / 48 blocks"),
        ("/home/me/runs/a", "a"),
        ("model.args.x=/a/b/c.yaml", "model.args.x=c.yaml"),
        ("folder:/home/me/cifar10/", "folder:cifar10"),
        ("folder:/home/me/cifar10/@test", "folder:cifar10@test"),
        ("run: /home/me/a is there, 3/4", "run: a is there, 3/4"),
        ("/", "/"),
        ("runs/b", "runs/b"),
        ("lr=2e-3", "lr=2e-3"),
    ],
)
def test_what_is_public_of_a_value(given, expected):
    assert public_value(given) == expected
    command = shlex.join(["stepsnet", "train", "a.yaml", f"--data={given}"])
    assert shlex.split(public_command(command)) == ["stepsnet", "train", "a.yaml", f"--data={expected}"]


def test_what_is_public_of_a_command():
    given = ["--run", "/home/a=b/c", "model.args.x=a=/home/me/x", "train=folder:/home/a=b/c", "1:/home/me/x"]
    expected = ["--run", "c", "model.args.x=a=x", "train=folder:c", "1:x"]
    assert shlex.split(public_command(shlex.join(given))) == expected


def test_the_upload(tmp_path, monkeypatch, capsys):
    """Without a network: what the hub's client is called with."""
    run, called, deleted = classifier(tmp_path / "run", "test_vit"), [], []

    def create_repo(api, repo_id, **settings):
        called.append(("create", repo_id, settings))
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(api, *, repo_id, folder_path, commit_message, delete_patterns):
        deleted.extend(delete_patterns)
        names = {path.name for path in Path(folder_path).iterdir()}
        called.append(("upload", repo_id, names, (Path(folder_path) / "README.md").read_text()))
        return f"https://huggingface.co/{repo_id}"

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    assert main(["push", str(run), "cats", "--private", "--out", str(run / "x")]) == 2
    assert "--private: got it with --out" in capsys.readouterr().err
    assert main(["push", str(run), "cats", "--private"]) == 0
    assert capsys.readouterr().out == "push: https://huggingface.co/me/cats\n"
    assert called[0] == ("create", "cats", {"private": True, "exist_ok": True})
    kind, repo, names, card = called[1]
    assert (kind, repo) == ("upload", "me/cats") and "hf-hub:me/cats" in card
    assert names == {"README.md", "classes.json", "config.json", "config.yaml", "model.safetensors"}

    assert names - {"README.md"} <= set(deleted)
    there = [
        "model-00001-of-00002.safetensors",
        "tokenizer.json",
        "figure.png",
        "notes/config.json",
        "LICENSE",
        "README.md",
    ]
    assert list(filter_repo_objects(there, allow_patterns=deleted)) == there[:2]

    def refused(api, repo_id, **settings):
        raise OSError("401 Client Error.\nInvalid username or password.")

    monkeypatch.setattr(HfApi, "create_repo", refused)
    assert main(["push", str(run), "cats"]) == 2
    said = capsys.readouterr().err
    assert "cannot upload to cats: 401 Client Error. Invalid username or password. (`hf auth login`" in said
    assert len(said.splitlines()) == 1


def test_what_cannot_be_pushed(tmp_path, capsys):
    run = classifier(tmp_path / "run", "test_vit")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    unfinished = classifier(tmp_path / "unfinished", "test_vit")
    (unfinished / "summary.json").unlink()
    both = classifier(tmp_path / "both", "test_vit")
    classifier(both / "stepsnet-seed0", "test_vit")
    (both / "summary.json").unlink()  # as a comparison is that has not ended
    (both / "recipes").mkdir()
    new = str(tmp_path / "new")
    for arguments, said in (
        ([run], "got neither REPO nor --out, expected one of them"),
        ([run, "a/b/c"], "got 'a/b/c', expected USER/NAME"),
        ([run, "--out", tmp_path / "full"], "is not empty, expected a new folder"),
        ([tmp_path / "none", "--out", new], "expected the folder of a run"),
        ([unfinished, "--out", new], "has not ended, expected a finished run"),
        ([both, "--out", new], "is a comparison, expected one of the runs in it: stepsnet-seed0"),
    ):
        assert main(["push", *map(str, arguments)]) == 2
        err = capsys.readouterr().err
        assert said in err and len(err.splitlines()) == 1, err
    (both / "stepsnet-seed0" / "classes.json").unlink()
    with pytest.raises(UserError, match=r"classes\.json"):
        publish_run_folder(both / "stepsnet-seed0", read_run_recipe(run), tmp_path / "full", "classes.json", "x")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["file"]
    with pytest.raises(UserError, match="has no weights"):
        (run / "model.safetensors").unlink()
        write_repository(run, tmp_path / "another")
    assert not (tmp_path / "another").exists()


@pytest.mark.parametrize("kind", ["comparison", "sweep"])
def test_where_one_run_is_meant_the_folder_of_several_is_refused_with_their_names(kind, tmp_path, capsys):
    """Also before any of them has ended, or begun."""
    folder, named = tmp_path / "several", "stepsnet-seed0"
    (folder / "recipes").mkdir(parents=True)
    if kind == "comparison":
        (folder / "config.yaml").write_text(to_yaml(find_recipe("digits/tiny")))
    said = f"run: got {folder}, which is a {kind}, expected one of the runs in it"
    for begun, end in ((False, ", of which none has begun"), (True, f": {named}")):
        if begun:
            (folder / named).mkdir()
            (folder / named / "config.yaml").write_text(to_yaml(find_recipe("digits/tiny")))
        for command in (
            ["push", folder, "--out", tmp_path / "out"],
            ["export", folder],
            ["export", "test_vit", "--weights", folder],
            ["grow", folder],
            ["bench", folder, "--out", tmp_path / "out"],
            *([] if begun else [["eval", folder], ["predict", folder, "a.png"]]),  # which take those with weights
        ):
            assert main([str(word) for word in command]) == 2
            err = capsys.readouterr().err
            assert f"{said}{end}" in err and len(err.splitlines()) == 1, (command, err)
        with pytest.raises(UserError, match=re.escape(f"{said}{end}")):
            stepsnet.runs.results.Run(folder)
    for seed in range(1, 8):
        (folder / f"stepsnet-seed{seed}").mkdir()
        (folder / f"stepsnet-seed{seed}" / "config.yaml").touch()
    with pytest.raises(UserError, match=r"in it: stepsnet-seed0, .*, stepsnet-seed4 and 3 more$"):
        stepsnet.runs.results.Run(folder)
    assert not (tmp_path / "out").exists()


def test_a_published_run_is_not_trained_over(tmp_path):
    """It has weights and no checkpoint: to go on with it would be to begin anew in its place."""
    run = finished(tmp_path / "run", override(find_recipe("digits/tiny"), ["data=digits"]))
    (run / "summary.json").unlink()
    weights = (run / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="has trained weights and no checkpoint to go on from, expected the folder of"):
        stepsnet.resume(run)
    assert (run / "model.safetensors").read_bytes() == weights
