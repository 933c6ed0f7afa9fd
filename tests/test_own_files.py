"""Nothing that no report and no analysis has written is replaced; nothing that only a file has asked for is fetched."""

import dataclasses
import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
import yaml
from run_folders import make_run
from toy_study import TOY, declared

from stepsnet import load, train
from stepsnet.cli import main
from stepsnet.errors import UserError
from stepsnet.files.cache import cache_folder, locked_entry
from stepsnet.files.own_files import LIST, OwnFiles, write_own_files
from stepsnet.models.build import build_model
from stepsnet.recipes import find_recipe
from stepsnet.report import write_report
from stepsnet.run_folder.checkpoint import save_weights
from stepsnet.run_folder.folder import read_run_recipe
from stepsnet.settings.config import ModelSpec
from stepsnet.settings.consent import fetched_by, remember_as_asked, require_asked_for
from stepsnet.settings.overrides import override, to_yaml

MINE = ("figures/loss.csv", "figures/depth.svg", "report.html")


@pytest.fixture
def a_run(tmp_path):
    return make_run(tmp_path / "run", done=3, stream=False)


@pytest.fixture
def undrawn(monkeypatch):
    """The page alone."""
    from matplotlib.figure import Figure

    empty = b'<svg viewBox="0 0 1 1"></svg>'
    monkeypatch.setattr(Figure, "savefig", lambda figure, out, **settings: out.write(empty) and None)


def test_pages_that_are_written_at_once_stay_ours(tmp_path):
    """A study is rendered while its sweep goes on: neither takes the other's page for somebody else's."""

    def write(number):
        write_own_files(tmp_path, {"study.md": str(number).encode()})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(64)))
    write(-1)


NAMES = (
    "a.png",
    "b/a.png",
    "two\nlines",
    "back\\slash",
    "back\\nslash",
    "carriage\rreturn",
    "form\x0cfeed",
    "\udcff.png",
)


def test_files_of_any_name_are_known_as_ours_until_they_are_changed(tmp_path):
    own = OwnFiles(tmp_path)
    for content in (b"first", b"second"):
        for name in NAMES:
            own.write(tmp_path / name, content)
    found = OwnFiles(tmp_path)  # also where nothing came behind the last of them
    assert all(found.has(tmp_path / name) for name in NAMES)
    own.settle()
    assert (tmp_path / LIST).read_bytes().count(b"\n") == len(NAMES)
    check = subprocess.run(["sha256sum", "--check", "--strict", "--quiet", LIST], cwd=tmp_path, capture_output=True)
    assert check.returncode == 0, check.stderr
    for name in NAMES:
        (tmp_path / name).write_bytes(b"first")
        assert not OwnFiles(tmp_path).has(tmp_path / name)
        (tmp_path / name).unlink()
        assert not OwnFiles(tmp_path).has(tmp_path / name)
    assert not OwnFiles(tmp_path).has(tmp_path / LIST)


def test_a_file_that_is_not_listed_is_not_read(tmp_path, monkeypatch):
    """Others' may be many and large: predict asks for each of its inputs."""
    own = OwnFiles(tmp_path)
    own.write(tmp_path / "a.png", b"ours")
    monkeypatch.setattr("stepsnet.files.own_files._sum_of", lambda path: pytest.fail(f"{path} was read"))
    assert not own.has(tmp_path / "b.png")


def test_a_file_is_listed_before_it_is_written(tmp_path, monkeypatch):
    """So a process that is killed between leaves no file that the next takes for somebody else's."""
    own = OwnFiles(tmp_path)
    own.write(tmp_path / "a.png", b"first")

    def killed_behind(path, content):
        path.write_bytes(content)
        raise KeyboardInterrupt

    monkeypatch.setattr("stepsnet.files.own_files.write_atomically", killed_behind)
    with pytest.raises(KeyboardInterrupt):
        own.write(tmp_path / "a.png", b"second")
    assert (tmp_path / "a.png").read_bytes() == b"second" and OwnFiles(tmp_path).has(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(b"first")  # where it was killed before it
    assert OwnFiles(tmp_path).has(tmp_path / "a.png")


@pytest.mark.parametrize("name", MINE)
def test_a_file_of_the_users_is_neither_replaced_nor_removed(a_run, tmp_path, capsys, name, undrawn):
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    asked = ["report", str(a_run), "--out", str(tmp_path / "report.html")]
    if name == "figures/depth.svg":  # of a figure that this report does not have
        assert main(asked) == 0
    else:
        assert main(asked) == 2
        assert f"{mine} was not written by stepsnet" in capsys.readouterr().err
        assert not [path for path in tmp_path.rglob("*.html") if path != mine]
        assert main([*asked, "--force"]) == 0 and mine.read_bytes() != b"mine"
        mine.write_text("mine")  # and it is edited
        assert main(asked) == 2
    assert mine.read_text() == "mine"


def test_a_report_replaces_its_own_files_and_removes_what_it_no_longer_has(tmp_path, undrawn):
    measured, other = make_run(tmp_path / "a"), make_run(tmp_path / "b", stream=False)
    page = write_report([measured], tmp_path / "report.html")
    assert (tmp_path / "figures" / "shortcut-ratio.csv").exists()
    first, listed = page.read_bytes(), (tmp_path / LIST).read_text()
    assert "figures/shortcut-ratio.csv" in listed
    write_report([other], page)
    assert page.read_bytes() != first and not (tmp_path / "figures" / "shortcut-ratio.csv").exists()
    assert "shortcut-ratio" not in (tmp_path / LIST).read_text()
    write_report([measured], page)
    assert page.read_bytes() == first and (tmp_path / LIST).read_text() == listed


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json"])
def test_a_report_is_not_written_over_a_runs_files(tmp_path, name, undrawn):
    run = make_run(tmp_path / "run")
    before = (run / name).read_bytes()
    with pytest.raises(UserError, match="was not written by stepsnet"):
        write_report([run], run / name)
    assert (run / name).read_bytes() == before


def test_an_analysis_does_not_replace_another(a_run, tmp_path, capsys):
    (tmp_path / "stream.csv").write_text("of other runs")
    assert main(["analyze", "shortcut", str(a_run), "--out", str(tmp_path)]) == 2
    assert f"{tmp_path / 'stream.csv'} already exists" in capsys.readouterr().err
    assert (tmp_path / "stream.csv").read_text() == "of other runs"


@pytest.fixture
def own_words(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("STEPSNET_FETCH", raising=False)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("data=hfds:someone/pictures", "data"),
        ("data=cifar10:nowhere", "data"),
        ("model.args.pretrained=true", "model.args.pretrained"),
        ("model.args.pretrained=1", "model.args.pretrained"),
        ('model.args.backbone_args={"pretrained": true}', "model.args.backbone_args.pretrained"),
        (
            'model.args.pretrained_cfg_overlay={"url": "http://127.0.0.1:9/w.bin"}',
            "model.args.pretrained_cfg_overlay.url",
        ),
        ('model.args.pretrained_cfg={"hf_hub_id": "a/b"}', "model.args.pretrained_cfg.hf_hub_id"),
        ('model={"name": "stepify", "args": {"model": "transformers:someone/name"}}', "model.args.model"),
    ],
)
def test_what_a_file_names_on_the_network_is_not_fetched_without_asking(change, key, tmp_path, capsys, own_words):
    recipe = override(find_recipe("digits/tiny"), [change])
    assert list(fetched_by(recipe)) == [key]
    run = make_run(tmp_path / "run")
    (run / "config.yaml").write_text(to_yaml(recipe))
    for command in (
        ["train", f"{run}/config.yaml", "--run", f"{tmp_path}/new"],
        ["eval", f"{run}"],
        ["resume", f"{run}"],
    ):
        assert main(command) == 2
        err = capsys.readouterr().err
        needs_none = command[0] == "eval" and key.endswith(".pretrained")  # it reads the run's own weights
        assert (f": {key} is " in err and "only if you ask for it" in err) != needs_none, err
    assert not (tmp_path / "new").exists()


def test_in_python_a_mapping_asks_for_what_it_names_alone(tmp_path, own_words, monkeypatch):
    """The rest of what it changes is the file's word."""
    monkeypatch.setattr("stepsnet.api.train_run", opened)
    theirs = override(find_recipe("digits/tiny"), ["model.args.pretrained=true"])
    (tmp_path / "theirs.yaml").write_text(to_yaml(theirs))

    def train_theirs(**changes):
        train(tmp_path / "theirs.yaml", tmp_path / "new", **changes)

    for changes in (
        {"model": {"args": {"depths": (2, 1, 1)}}},
        {"model": {}},
        {"model": {"args": {"pretrained_cfg": {}}}},
        {"model.args": {"depths": (2, 1, 1)}},
        {"baseline": theirs.model},
    ):
        with pytest.raises(UserError, match=r"model\.args\.pretrained is True, which is fetched"):
            train_theirs(**changes)
    assert not (cache_folder() / "fetched.json").exists()
    for changes in ({"model": {"args": {"pretrained": True}}}, {"model": theirs.model}):
        for each in (changes, {}):  # once is enough
            with pytest.raises(UserError, match="the data are opened"):
                train_theirs(**each)
        (cache_folder() / "fetched.json").unlink()


def test_weights_are_asked_for_with_the_model_whose_they_are(tmp_path, own_words):
    def recipe(name, **args):
        return dataclasses.replace(find_recipe("digits/tiny"), model=ModelSpec(name, args))

    asked = [
        recipe("resnet18", pretrained=True),
        recipe("stepify", model="resnet18", pretrained=True),
        recipe("mask_rcnn", backbone="resnet18", backbone_args={"pretrained": True}),
    ]
    for one in asked:
        remember_as_asked(one)
    for one in (*asked, recipe("resnet18", pretrained=True, in_chans=1)):
        require_asked_for(one, tmp_path)
    for other in (
        recipe("resnet50", pretrained=True),
        recipe("stepify", model="resnet50", pretrained=True),
        recipe("mask_rcnn", backbone="resnet50", backbone_args={"pretrained": True}),
    ):
        with pytest.raises(UserError, match="pretrained is True, which is fetched"):
            require_asked_for(other, tmp_path)


def test_a_configuration_of_transformers_does_not_bring_its_code(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *words: "y")  # to the question of transformers
    config = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Theirs"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "theirs.py").write_text("raise SystemExit('their code runs')\n")
    with pytest.raises(UserError, match=r"model: transformers:.*contains custom code"):
        build_model(ModelSpec("stepify", {"model": f"transformers:{tmp_path}"}))


def test_a_run_that_began_with_fetched_weights_is_used_elsewhere(tmp_path, capsys, own_words):
    """Its own weights are there, so nothing is fetched, and nothing has to be asked for."""
    run = make_run(tmp_path / "run")
    recipe = find_recipe("digits/tiny")
    model = build_model(recipe.model)
    save_weights(run / "model.safetensors", model.state_dict())
    (run / "config.yaml").write_text(to_yaml(override(recipe, ["model.args.pretrained=true"])))
    loaded = load(run)
    assert torch.equal(next(loaded.model.parameters()), next(model.parameters()))
    assert main(["resume", str(run)]) == 2  # which would start from them
    assert "only if you ask for it" in capsys.readouterr().err


def test_a_grown_run_has_the_weights_that_it_grew_from(tmp_path, own_words):
    args = {"model": "deit_tiny_patch16_224", "weights": "timm:deit_tiny_patch16_224", "steps": 2}
    recipe = dataclasses.replace(find_recipe("digits/tiny"), model=ModelSpec("grow", args))
    require_asked_for(recipe, tmp_path, has_weights=True)
    with pytest.raises(UserError, match=r"model.args.weights is 'timm:deit_tiny_patch16_224', which is fetched"):
        require_asked_for(recipe, tmp_path)


def test_what_was_asked_for_once_is_remembered(tmp_path, capsys, own_words, monkeypatch):
    file = tmp_path / "mine.yaml"
    file.write_text(to_yaml(override(find_recipe("cifar10/shallow"), [f"data=cifar10:{tmp_path / 'none'}"])))
    asked = ["train", str(file), "--run", str(tmp_path / "new"), "batch_size=1", "model.name=nonsense"]
    assert main(asked) == 2 and "only if you ask for it" in capsys.readouterr().err
    assert main([*asked, "--data", f"cifar10:{tmp_path / 'none'}"]) == 2
    assert "model: got 'nonsense'" in capsys.readouterr().err
    assert main(asked) == 2 and "model: got 'nonsense'" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setenv("STEPSNET_FETCH", "1")
    assert main(asked) == 2 and "model: got 'nonsense'" in capsys.readouterr().err


def test_a_model_that_was_asked_for_is_in_its_baselines_runs_too(tmp_path, own_words):
    """Of which the files name it in another place, and which `compare` itself reads at its end."""
    args = {"model": "hf-hub:someone/net", "pretrained": True}
    spec, baseline = ModelSpec("stepify", args), ModelSpec("hf-hub:someone/net", {"pretrained": True})
    recipe = dataclasses.replace(find_recipe("digits/tiny"), model=spec, baseline=baseline)
    for file in ("config.yaml", "other.yaml"):
        (tmp_path / file).write_text(to_yaml(recipe.of_baseline()))
    with pytest.raises(UserError, match=r"model\.name is 'hf-hub:someone/net', which is fetched"):
        read_run_recipe(tmp_path)
    remember_as_asked(recipe)
    require_asked_for(read_run_recipe(tmp_path), tmp_path / "other.yaml")


def test_resume_takes_the_words_that_it_asks_for(tmp_path, capsys, own_words, monkeypatch):
    monkeypatch.setattr("stepsnet.commands.train.train_and_tell", lambda recipe, *_: resumed.append(recipe))
    resumed = []
    args = {"model": "transformers:someone/net", "steps": 3}
    recipe = dataclasses.replace(find_recipe("digits/tiny"), model=ModelSpec("stepify", args))
    (tmp_path / "config.yaml").write_text(to_yaml(recipe))
    word = "model.args.model=transformers:someone/net"
    assert main(["resume", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert f"{tmp_path / 'config.yaml'}: model.args.model is" in err and f"expected {word} on the command" in err
    assert main(["resume", str(tmp_path), word]) == 0 and [one.model for one in resumed] == [recipe.model]
    assert main(["resume", str(tmp_path)]) == 0


def test_commands_that_start_at_once_remember_what_each_asked_for(own_words):
    recipes = [override(find_recipe("digits/tiny"), [f"data=hfds:{name}"]) for name in ("one/a", "two/b")]
    file = cache_folder() / "fetched.json"
    remember_as_asked(recipes[0])
    with ThreadPoolExecutor() as threads:
        with locked_entry(file):  # as another process has it, between reading the file and writing it
            there = json.loads(file.read_text())
            other = threads.submit(remember_as_asked, recipes[1])
            wait([other], timeout=0.2)
            file.write_text(json.dumps([*there, "tokenizer=gpt2"]))
        other.result(60)
    assert json.loads(file.read_text()) == ["data=hfds:one/a", "data=hfds:two/b", "tokenizer=gpt2"]


def test_data_that_are_here_need_no_asking(tmp_path):
    for data in (
        "digits",
        f"folder:{tmp_path}",
        f"hfds:{tmp_path}",
        f"hfds:{tmp_path}:fine_label@test",
        f"transformers:{tmp_path}",
        f"cifar10:{tmp_path}@test",
        "python-docs",
    ):
        assert not fetched_by(override(find_recipe("digits/tiny"), [f"data={data}"])), data
    assert list(fetched_by(override(find_recipe("python-docs/tiny"), ["tokenizer=gpt2"]))) == ["tokenizer"]


def opened(*arguments, **options):
    raise UserError("the data are opened")


THEIRS = [{**TOY["contenders"][0], "recipe": "theirs.yaml"}]


@pytest.mark.parametrize(
    ("changes", "key", "named"),
    [
        ({"data": "hfds:someone/pictures"}, "data", ["--data", "hfds:someone/pictures"]),
        ({"recipe": "theirs.yaml"}, "data", ["--data", "cifar10:nowhere"]),
        ({"contenders": THEIRS}, "data", ["--data", "cifar10:nowhere"]),
        (
            {"settings": {**TOY["settings"], "model.args.pretrained": True}},
            "model.args.pretrained",
            ["model.args.pretrained=true"],
        ),
    ],
)
def test_what_a_study_of_a_file_names_is_not_fetched_without_asking(
    changes, key, named, tmp_path, capsys, own_words, monkeypatch
):
    monkeypatch.setattr("stepsnet.commands.sweep_study.check_models", opened)
    monkeypatch.setattr("stepsnet.commands.sweep_study.conduct", opened)
    (tmp_path / "theirs.yaml").write_text(to_yaml(override(find_recipe("digits/tiny"), ["data=cifar10:nowhere"])))
    asked = ["sweep", str(declared(tmp_path, **changes)), "--run", str(tmp_path / "new")]
    for more in ([], ["--dry-run"], ["--resume"]):
        assert main([*asked, *more]) == 2
        err = capsys.readouterr().err
        assert f"toy.yaml: {key} is " in err and "only if you ask for it" in err and len(err.splitlines()) == 1, err
    for more in (named, [], ["--dry-run"]):  # once is enough
        assert main([*asked, *more]) == 2 and "the data are opened" in capsys.readouterr().err
    assert main([*asked, "model.args.depths=[3]"]) == 2
    assert "with a study, whose settings are declared" in capsys.readouterr().err


def test_what_a_sweep_of_recipes_names_is_asked_for(tmp_path, own_words, monkeypatch):
    """Its runs' own files name it afterwards, and are resumed and evaluated."""
    monkeypatch.setattr("stepsnet.commands.sweep.sweep_and_tell", lambda recipes, *_: trained.extend(recipes))
    trained = []
    assert main(["sweep", "digits/tiny", "--data", "hfds:someone/pictures", "--run", str(tmp_path / "s")]) == 0
    require_asked_for(trained[0], tmp_path / "s" / "config.yaml")
    assert json.loads((cache_folder() / "fetched.json").read_text()) == ["data=hfds:someone/pictures"]


def test_what_a_study_of_this_package_names_is_asked_for(capsys, own_words, monkeypatch):
    monkeypatch.setattr("stepsnet.commands.sweep_study.check_models", opened)
    data = ["--data", "cifar10:nowhere"]
    assert main(["sweep", "evidence/digits", "--dry-run", *data]) == 2
    assert "the data are opened" in capsys.readouterr().err
    assert json.loads((cache_folder() / "fetched.json").read_text()) == ["data=cifar10:nowhere"]


def test_what_a_recipe_of_this_package_names_may_be_fetched_for_a_study_of_a_file(
    tmp_path, capsys, own_words, monkeypatch
):
    monkeypatch.setattr("stepsnet.commands.sweep_study.check_models", opened)
    monkeypatch.chdir(tmp_path)  # without data/cifar10
    of_study = {key: value for key, value in TOY.items() if key != "data"} | {"recipe": "cifar10/shallow"}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(of_study))
    assert main(["sweep", "study.yaml", "--dry-run"]) == 2
    assert "the data are opened" in capsys.readouterr().err
