"""Modules of a user's: the examples of docs/extend.md as files, in every verb, and what goes wrong with them."""

import dataclasses
import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, Literal

import numpy as np
import pydantic
import pytest
import torch
from PIL import Image
from test_docs import blocks

import stepsnet
from stepsnet.cli import main
from stepsnet.errors import USER_CODE, UserError
from stepsnet.recipes import find_recipe
from stepsnet.run_folder.resuming import open_run_folder
from stepsnet.runs.launch import Job
from stepsnet.settings import user_modules
from stepsnet.settings.config import ClassificationRecipe, DetectionRecipe, ModelSpec, Recipe
from stepsnet.settings.field_types import STRICT
from stepsnet.settings.overrides import _validated, override, read_recipe, to_plain, to_yaml
from stepsnet.settings.user_modules import import_user_modules, module_versions
from stepsnet.tasks import macs_of
from stepsnet.tasks.language.generation import generate

PAGE = Path(__file__).parent.parent / "docs" / "extend.md"

pytestmark = pytest.mark.usefixtures("own_registrations")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The page's files in a folder beside the current one."""
    for block in (*blocks(PAGE, "python"), *blocks(PAGE, "yaml")):
        path = tmp_path / "mine" / re.match(r"# (\S+)", block)[1]
        path.parent.mkdir(exist_ok=True)
        path.write_text(block, encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where a fault is written down
    return tmp_path / "mine"


def forget():
    """As in a new process."""
    for name in ("my_models", "my_lm", "my_data", "my_task"):
        sys.modules.pop(name, None)
    for folder in [folder for folder in sys.path if folder.endswith("mine")]:
        sys.path.remove(folder)


def verb(capsys, *arguments):
    forget()
    status = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    return printed.out


def test_a_language_model_is_trained_and_continues_a_text(project, capsys):
    (project / "words.txt").write_text("now and then a word, " * 2000)
    small = ["model.args.hidden_size=8", "seq_len=32", "batch_size=4", "epochs=1", "epoch_updates=2", "device=cpu"]
    model = 'model={"name": "causal_lm", "args": {"model_type": "my_lm"}}'
    data = ("--data", f"text:{project / 'words.txt'}", f"import_from={project}", "import=my_lm")
    verb(capsys, "train", "tinyshakespeare/shallow", *data, model, *small, "--run", "lm")
    assert "now" in verb(capsys, "predict", "lm", "--prompt", "now", "--tokens", "3")
    assert main(["train", "tinyshakespeare/shallow", *data, "model.name=test_vit", "model.args={}"]) == 2
    assert "got 'test_vit', a VisionTransformer, expected a causal language model" in capsys.readouterr().err


def test_a_model_without_a_cache_reads_the_whole_text_for_each_token(project, monkeypatch):
    forget()
    monkeypatch.syspath_prepend(str(project))
    my_lm = importlib.import_module("my_lm")
    torch.manual_seed(0)
    model = my_lm.MyLM(my_lm.MyConfig(vocab_size=40, hidden_size=16)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    prompts = expected = torch.randint(0, 40, (2, 6))
    for _ in range(8):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    tokenizer = SimpleNamespace(token_to_id=lambda token: None)
    assert torch.equal(generate(model, prompts, tokenizer, 8, temperature=0, seed=0), expected)


def test_a_task_that_derives_from_ours_has_its_compute():
    @pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
    class Mine(ClassificationRecipe):
        task: Literal["mine"] = "mine"

    fields = {"name": "a", "model": ModelSpec("test_vit"), "data": "digits", "batch_size": 1, "img_size": 96}
    stepsnet.register_task(Mine, build=lambda *_: None)
    assert macs_of(Mine(**fields)) == macs_of(ClassificationRecipe(**fields)) > 0


def test_what_the_data_decide_in_a_task_of_ones_own_is_no_other_recipe_on_resuming(tmp_path):
    @pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
    class Fitted(Recipe):
        task: Literal["fitted"] = "fitted"
        outputs: int | None = None
        left_open: ClassVar = {"outputs": None}

    stepsnet.register_task(Fitted, build=lambda *_: None)
    asked = Fitted(name="a", model=ModelSpec("test_vit"), data="digits")
    open_run_folder(tmp_path, dataclasses.replace(asked, outputs=3))
    assert open_run_folder(tmp_path, asked, resume=True).outputs == 3
    with pytest.raises(UserError, match="holds a run with outputs 3, got 4"):
        open_run_folder(tmp_path, dataclasses.replace(asked, outputs=4), resume=True)


def test_a_recipe_types_own_message_may_have_braces():
    @pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
    class Braced(Recipe):
        task: Literal["braced"] = "braced"

        def __post_init__(self):
            super().__post_init__()
            raise ValueError("scales: got {'a': 1}, expected numbers")

    stepsnet.register_task(Braced, build=lambda *_: None)
    values = {"task": "braced", "name": "a", "model": {"name": "test_vit"}, "data": "digits"}
    with pytest.raises(UserError, match=r"scales: got \{'a': 1\}, expected numbers"):
        _validated(values, "recipe")


def test_a_model_is_found_again_by_every_verb(project, capsys, monkeypatch):
    """By the child of a comparison too, which is a process of its own; and from another folder."""
    Path("copy.yaml").write_text(to_yaml(read_recipe(project / "my_model.yaml")))
    job = Job("StepsNet", "StepsNet", "copy.yaml", "run")
    child = [sys.executable, "-m", "stepsnet.runs.launch"]
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
        process.stdin.flush()  # and left open: a child ends with its parent
        said = process.stdout.read()
    assert process.returncode == 0, said
    config = read_recipe(Path("run/config.yaml"))
    assert (config.imports, config.import_from) == (("my_models",), str(project))
    monkeypatch.chdir(project.parent / "elsewhere")
    run = Path("..") / "run"
    summary = json.loads((run / "summary.json").read_text())
    scores = json.loads(verb(capsys, "eval", run, "--json"))
    assert scores["top1"] == pytest.approx(summary["metrics"]["val_top1"]) and len(summary["widths"]) == 8
    assert "last 4 of width 16" in verb(capsys, "analyze", "drop", run)
    few = ("--memory", "0", "--rounds", "1", "--batch-size", "2", "--no-train")
    assert "| run |" in verb(capsys, "bench", run, *few)
    verb(capsys, "train", run / "config.yaml", "--run", run, "--resume")
    assert "my_models" in sys.modules
    (project / "my_models.py").unlink()
    forget()
    assert main(["eval", str(run)]) == 2
    said = capsys.readouterr().err
    assert f"import: found no module 'my_models', expected it in {Path.cwd()} or {project} or sys.path" in said


def test_data_of_a_kind_of_ones_own(project, capsys):
    rng = np.random.default_rng(0)
    lines = ["file,class,split"]
    for number in range(24):
        kind = ("dark", "light")[number % 2]
        pixels = rng.integers(0, 100, (12, 12)) + 150 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(project / f"{number}.jpg")
        lines.append(f"{number}.jpg,{kind},{'train' if number < 16 else 'val'}")
    (project / "labels.csv").write_text("\n".join(lines))
    model = ["model.args.num_classes=2", "model.args.depths=[1,1,1]"]
    change = [*model, "epochs=1", "batch_size=8", "import=my_data", f"import_from={project}"]
    verb(capsys, "train", "digits/tiny", *change, f"data=csv:{project / 'labels.csv'}", "--run", "run", "workers=1")
    found = json.loads(verb(capsys, "predict", "run", project / "0.jpg", "--json"))
    assert found[0]["classes"].keys() == {"dark", "light"}
    (project / "labels.csv").write_text("path\n")
    forget()
    assert main(["eval", "run"]) == 2 and "has no columns file, class and split" in capsys.readouterr().err


def test_a_task_of_ones_own(project, capsys):
    verb(capsys, "train", project / "my_task.yaml", "--run", "run")
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["metrics"]["val_rmse"] == pytest.approx(summary["metrics"]["val_loss"] ** 0.5)
    scored = json.loads(verb(capsys, "eval", "run", "--json"))["rmse"]  # by the optimized model, which rounds otherwise
    assert scored == pytest.approx(summary["metrics"]["val_rmse"], rel=1e-5)
    verb(capsys, "report", "run", "--out", "page.html")
    assert "RMSE" in Path("page.html").read_text(encoding="utf-8")  # the metric is registered again
    Image.fromarray(np.full((8, 8), 255, np.uint8)).save("white.png")
    assert re.fullmatch(r"white.png: -?\d\.\d{3}\n", verb(capsys, "predict", "run", "white.png"))
    run = stepsnet.load("run")
    assert run.metrics["val_rmse"].iloc[-1] == summary["metrics"]["val_rmse"]
    assert run.predict(np.ones((8, 8))).keys() == {"ink"}
    faulty = (project / "my_task.py").read_text().replace("loss = self", "loss = 1 / 0 * self")
    (project / "my_task.py").write_text(faulty)
    forget()
    assert main(["eval", "run"]) == 70
    said = capsys.readouterr().err
    assert re.match(rf"stepsnet: {project}/my_task.py, line \d+: ZeroDivisionError: division by zero \(the full", said)
    for change, said in ((["noise=-1"], "noise: got -1, expected at least 0"), (["nois=1"], "did you mean noise")):
        with pytest.raises(UserError, match=said):
            override(run.recipe, change)


def test_a_task_of_ones_own_with_all_that_a_task_may_have(project, capsys):
    """Data that are opened once decide a setting, and the trained model is exported."""
    file = project / "my_task.py"
    more = """
def open_data(recipe, data, run):
    with open("opened.txt", "a") as file:
        print(data, file=file)
    return 0.25


def resolve(recipe, opened):
    return dataclasses.replace(recipe, noise=opened), [f"noise: {opened}, by the data"]


def with_data(recipe, data, run, opened):
    assert opened == 0.25 and (run or recipe.noise == opened)
    return build(recipe)


def deployment(run, recipe, model):
    return Deployment(task="ink", shape=(1, 8, 8), preprocessing={"divisor": 255}, outputs=("ink",))


stepsnet.register_task(
    InkRecipe, build=with_data, open_data=open_data, resolve=resolve, deployment=deployment, metrics=[rmse]
)
"""
    before = file.read_text().rpartition("stepsnet.register_task")[0]
    file.write_text("import dataclasses\nfrom stepsnet.tasks.deployment import Deployment\n" + before + more)
    plain = {"name": "my_convnet", "args": {"widths": [16], "depths": [4], "num_classes": 1}}
    recipe = [f"baseline={json.dumps(plain)}", "epochs=1"]
    said = verb(capsys, "compare", project / "my_task.yaml", *recipe, "--run", "both")
    assert Path("opened.txt").read_text().splitlines()[0] == "digits" and "noise: 0.25, by the data" in said
    assert read_recipe(Path("both/stepsnet-seed0/config.yaml")).noise == 0.25
    told = json.loads(verb(capsys, "export", "both/stepsnet-seed0", "--format", "torch", "--json"))
    assert (told["task"], told["preprocessing"]) == ("ink", {"divisor": 255})
    (ink,) = torch.export.load("stepsnet-seed0.pt2").module()(torch.zeros(3, 1, 8, 8))
    assert ink.shape == (3, 1)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("https://example.org/evil", "got 'https://example.org/evil', expected the name of a module"),
        ("../my_models", "got '../my_models', expected the name of a module, such as my_models"),
        ("my_modelss", "found no module 'my_modelss', expected it in"),
        ("my_broken", "my_broken fails: ZeroDivisionError: division by zero (my_broken.py, line 1)"),
        ("my_needs", "my_needs needs a_package_that_is_not_there, which is not installed"),
        ([1], "import.0: got 1, expected a valid string"),
        ("my_detection", "expected a name that is not one of stepsnet's own tasks"),
    ],
)
def test_what_cannot_be_imported_is_one_line(names, said, project):
    (project / "my_broken.py").write_text("1 / 0\n")
    (project / "my_needs.py").write_text("import a_package_that_is_not_there\n")
    text = "import stepsnet, stepsnet.settings.config as c\nstepsnet.register_task(c.DetectionRecipe, build=None)\n"
    (project / "my_detection.py").write_text(text)
    with pytest.raises(UserError) as raised:
        override(find_recipe("digits/tiny"), [f"import={json.dumps(names)}", f"import_from={project}"])
    assert said in str(raised.value) and len(str(raised.value).splitlines()) == 1


def test_what_cannot_be_registered():
    for wrong in (dict, DetectionRecipe, stepsnet.settings.config.Recipe):
        with pytest.raises(ValueError, match="register_task"):
            stepsnet.register_task(wrong, build=None)
    for kind in ("digits", "folder", "a:b", ""):
        with pytest.raises(ValueError, match="register_source"):
            stepsnet.register_source(kind)


def test_import_is_a_key_like_others(tmp_path):
    recipe = find_recipe("digits/tiny")
    plain = to_plain(recipe)
    assert plain["import"] == [] and plain["import_from"] is None and "imports" not in plain
    (tmp_path / "my_own.py").write_text("")
    changed = override(recipe, ["import=my_own", f"import_from={tmp_path}"])
    assert changed.imports == ("my_own",) and override(changed, ["import=[]"]).imports == ()
    import_user_modules(["my_own"])  # it is there already
    with pytest.raises(UserError, match="unknown key 'imprt'"):
        override(recipe, ["imprt=x"])
    with pytest.raises(UserError, match=r"task: got 'ink', expected one of 'classification'.*, or one that a module"):
        override(recipe, ["task=ink"])


def test_what_is_installed_or_ours_is_no_code_of_the_users(tmp_path, monkeypatch):
    """As in a clone, whose folder holds stepsnet and .venv, beside a module that imports more of both."""
    module = tmp_path / "my_beside.py"
    module.write_text("import my_helper\n")
    (tmp_path / "my_helper.py").write_text("WIDTH = 8\n")
    monkeypatch.chdir(tmp_path)
    import_user_modules(["my_beside"])
    assert {str(module), str(tmp_path / "my_helper.py")} <= USER_CODE
    assert user_modules._own_files("my_beside", sys.modules) == [module, tmp_path / "my_helper.py"]
    root = Path(stepsnet.__file__).parents[1]
    monkeypatch.setitem(sys.modules, "my_beside", SimpleNamespace(__file__=str(root / "my_beside.py")))
    assert user_modules._own_files("my_beside", {"stepsnet.plan", "torch", "my_beside", "json"}) == [
        root / "my_beside.py"
    ]
    (version,) = module_versions(["my_beside", "my_other"]).values()
    sys.modules.pop("my_beside"), sys.modules.pop("my_helper")
    (tmp_path / "my_helper.py").write_text("WIDTH = 16\n")
    import_user_modules(["my_beside"])
    assert version.startswith("sha256:") and module_versions(["my_beside"]) != {"my_beside": version}


@pytest.mark.parametrize("name", ["my_twice", "my_package.inside", "my_namespace.inside"])
def test_a_module_of_another_folder_is_not_taken_for_one_of_the_same_name(name, tmp_path, monkeypatch):
    """As for two runs, each with its own module, in one bench or notebook."""
    monkeypatch.chdir(tmp_path)
    file = Path(name.replace(".", "/") + ".py")
    for folder, text in (("a", "import my_depth\n"), ("same", "import my_depth\n"), ("b", "DEPTH = 3\n")):
        (tmp_path / folder / file).parent.mkdir(parents=True)
        (tmp_path / folder / file).write_text(text)
        (tmp_path / folder / "my_depth.py").write_text("")
        if name.startswith("my_package"):
            (tmp_path / folder / "my_package" / "__init__.py").write_text("")
    for folder in ("a", "same", "a"):
        import_user_modules([name], folder)
    (tmp_path / "same" / "my_depth.py").write_text("DEPTH = 3\n")  # which the module imports
    for folder in ("b", "same"):
        with pytest.raises(UserError) as raised:
            import_user_modules([name], folder)
        (said,) = str(raised.value).splitlines()
        assert f"import: got {name} of {tmp_path / 'a' / file}" in said, said
        assert f"expected that of {tmp_path / folder / file}" in said, said
    (tmp_path / "a" / file).write_text("DEPTH = 5\n")  # a notebook's module that is edited is the same one
    import_user_modules([name], "a")


PACKAGE = {
    "__init__.py": "",
    "common.py": "WIDTH = 8\n",
    "half_a.py": "from .common import WIDTH\n",
    "half_b.py": "import my_package.common\nfrom . import more\ntry:\n    import my_shared\nfinally:\n    pass\n",
    "more.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import half_a\n"
    "def later():\n    from . import half_a\n",
}


@pytest.mark.parametrize("first", [["my_package.half_a", "my_shares"], []])
def test_the_checksum_of_a_module_is_not_of_what_others_have_imported(first, tmp_path, monkeypatch):
    """As in the parent of a study, which imports the modules of all contenders, and in the process of one run."""
    files = {f"my_package/{name}": text for name, text in PACKAGE.items()}
    files |= {"my_shared.py": "", "my_shares.py": "import my_shared\n"}
    (tmp_path / "my_package").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    named = ["my_package.half_b", "my_shared"]
    import_user_modules([*first, *named])
    own = ["my_package/__init__.py", "my_package/common.py", "my_package/half_b.py", "my_package/more.py"]
    expected = [tmp_path / name for name in (*own, "my_shared.py")]
    assert module_versions(named) == {
        "my_package.half_b": user_modules._version_of(expected),
        "my_shared": user_modules._version_of(expected[-1:]),
    }


def test_a_package_that_imports_all_that_is_in_its_folder_has_the_checksum_of_it(tmp_path, monkeypatch):
    all_of = "import importlib, pkgutil\nfor each in pkgutil.iter_modules(__path__):\n"
    files = {"__init__.py": f"{all_of}    importlib.import_module(f'{{__name__}}.{{each.name}}')\n", "one.py": ""}
    (tmp_path / "my_registry").mkdir()
    for name, text in files.items():
        (tmp_path / "my_registry" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    import_user_modules(["my_registry"])
    expected = user_modules._version_of([tmp_path / "my_registry" / name for name in files])
    assert module_versions(["my_registry"]) == {"my_registry": expected}
