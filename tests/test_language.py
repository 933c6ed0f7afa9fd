"""Language modelling: text to tokens, batches, perplexity, and runs from the command line."""

import html
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from stepsnet.cli import main
from stepsnet.engine.task import BatchShard
from stepsnet.errors import UserError
from stepsnet.models.steps_transformer import create
from stepsnet.output.terminal import printable
from stepsnet.run_folder.inspection import read_inspection
from stepsnet.settings.config import LanguageRecipe, ModelSpec
from stepsnet.tasks.language import predict
from stepsnet.tasks.language.data import END_OF_TEXT, Split, TextData, load_text, load_tokenizer
from stepsnet.tasks.language.generation import generate
from stepsnet.tasks.language.sources import open_texts
from stepsnet.tasks.language.task import LanguageModelling
from stepsnet.tasks.prediction import PredictInputs

CPU = torch.device("cpu")
MODEL = {"widths": (16, 24, 32), "depths": (1, 1, 1), "num_attention_heads": (2, 2, 2), "max_position_embeddings": 64}
SMALL = ["model.args.widths=[16,32]", "model.args.depths=[1,1]", "model.args.num_attention_heads=[2,2]", "epochs=2"]
SMALL += ["model.args.vocab_size=280", "vocab_size=280", "seq_len=16", "batch_size=4", "epoch_updates=6"]
WORDS = ["step", "by", "step", "the", "network", "widens", "naïve", "β", "a\tb", "line"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    for name, count in (("train", 3000), ("valid", 300), ("test", 200)):
        words = rng.choice(WORDS, count)
        body = "".join(word + ("\n" if i % 9 == 8 else " ") for i, word in enumerate(words))
        (folder / f"{name}.txt").write_text(body, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A run of two epochs that nothing interrupts; no test changes its folder."""
    run = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPSNET_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        assert main(command(text, run)[3:]) == 0
    return run


def task_of(tokens, val=None, batch_size=2, seq_len=8, **kwargs):
    """A task on given tokens, of 50 kinds."""
    splits = {"train": np.asarray(tokens, dtype=np.uint16), "val": np.asarray(val or tokens, dtype=np.uint16)}
    data = TextData(None, {name: Split(found, 3 * len(found), len(found) // 2) for name, found in splits.items()})
    return LanguageModelling(recipe_of(batch_size, seq_len, **kwargs), data, "val")


def recipe_of(batch_size, seq_len, **settings):
    spec = ModelSpec("causal_lm")
    return LanguageRecipe(name="text", model=spec, data="text", batch_size=batch_size, seq_len=seq_len, **settings)


def small_model(**changes):
    torch.manual_seed(0)
    model = create(**{**MODEL, "vocab_size": 50, **changes}).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model


@pytest.mark.parametrize("kind, vocab_size", [("bpe", 280), ("characters", None)])
def test_tokens_are_the_text(text, kind, vocab_size):
    data = load_text(f"text:{text}", kind, vocab_size)
    for name, file in (("train", "train"), ("val", "valid"), ("test", "test")):
        body, split = (text / f"{file}.txt").read_text(encoding="utf-8"), data.splits[name]
        assert data.tokenizer.decode(split.tokens.tolist()) == body
        assert split.characters == len(body) and split.words == len(body.split())
        assert split.tokens.dtype == np.uint16 and isinstance(split.tokens, np.memmap)
    letters = set((text / "train.txt").read_text(encoding="utf-8"))
    assert data.tokenizer.get_vocab_size() == (280 if kind == "bpe" else len(letters) + 2)


def test_a_file_alone_is_split_at_nine_tenths(text):
    body = (text / "train.txt").read_text(encoding="utf-8")
    data = load_text(str(text / "train.txt"), "characters", None)
    cut = int(0.9 * len(body))
    assert data.tokenizer.decode(data.splits["val"].tokens.tolist()) == body[cut:] and "test" not in data.splits


def test_documents_are_kept_apart():
    data = load_text("python-docs", "bpe", 512)
    end = data.tokenizer.token_to_id(END_OF_TEXT)
    from pydoc_data.topics import topics

    held_out = [topics[name] for name in sorted(topics)][::10]
    counts = {"val": len(held_out), "train": sum(text not in held_out for text in topics.values())}
    assert {name: (split.tokens == end).sum() + 1 for name, split in data.splits.items()} == counts


def test_packing_that_was_stopped_is_begun_anew(text, monkeypatch):
    from stepsnet.tasks.language import data as text_data

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(text_data, "_encode", stopped)
        with pytest.raises(KeyboardInterrupt):
            load_text(f"text:{text}", "bpe", 281)
    data = load_text(f"text:{text}", "bpe", 281)
    assert len(data.splits["train"].tokens) > 3000
    with monkeypatch.context() as patch:  # it is packed once
        patch.setattr(text_data, "_encode", stopped)
        assert np.array_equal(load_text(f"text:{text}", "bpe", 281).splits["train"].tokens, data.splits["train"].tokens)


def test_a_runs_evaluation_finds_the_tokens_of_its_training(trained, text, monkeypatch):
    from stepsnet.tasks.language import data as text_data

    def refuse(*_):
        raise AssertionError("tokenized again")

    own = load_tokenizer(trained / "tokenizer.json")
    first = load_text(f"text:{text}", "bpe", 280)
    every = ("train", "val", "test")
    other = load_text(f"text:{text}", "bpe", 281, tokenizer=own, needed=every)  # its tokens are none of 281 kinds
    with monkeypatch.context() as patch:
        patch.setattr(text_data, "_encode", refuse)
        again = load_text(f"text:{text}", "bpe", 280, tokenizer=own, needed=every)
    assert again.splits["train"].tokens.filename == first.splits["train"].tokens.filename
    assert other.tokenizer.get_vocab() == own.get_vocab()
    for name, split in first.splits.items():
        assert np.array_equal(other.splits[name].tokens, split.tokens)


@pytest.mark.parametrize("temperature", [0, 2])
def test_a_cache_is_used_where_there_is_one(temperature):
    """And a temperature may be a whole number."""
    model, lengths = small_model(), []
    model.register_forward_pre_hook(
        lambda _, args, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    tokenizer = SimpleNamespace(token_to_id=lambda token: None)
    found = generate(model, torch.arange(6)[None], tokenizer, 4, temperature, seed=0)
    assert found.shape == (1, 10) and lengths == [1, 6, 1, 1, 1]


def test_a_pass_visits_every_sequence_once_at_another_offset():
    task = task_of(range(50), batch_size=1)  # 5 sequences of 8, and room for the offset
    assert task.sequences == task.steps_per_epoch == 5
    offsets = set()
    for turn in range(6):
        starts = [task.start_of(5 * turn + i) for i in range(5)]
        offset = min(starts)
        assert sorted(starts) == [offset + 8 * i for i in range(5)] and 0 <= offset < 8
        offsets.add(offset)
    assert len(offsets) > 2
    (batch,) = list(task.batches(0, 4, BatchShard(), CPU))
    assert batch.tolist() == [list(range(task.start_of(4), task.start_of(4) + 9))]


def test_batches_depend_on_seed_and_update_alone():
    def numbers(task, share=BatchShard(), epoch=1, start=0):  # noqa: B008 - it is frozen
        return torch.cat(list(task.batches(epoch, start, share, CPU)))

    make = lambda **kwargs: task_of(range(200), batch_size=4, epoch_updates=7, **kwargs)  # noqa: E731 - more than a pass
    whole = numbers(make())
    assert whole.shape == (28, 9) and torch.equal(numbers(make(), start=3), whole[12:])
    assert not torch.equal(numbers(make(seed=1)), whole) and not torch.equal(numbers(make(), epoch=0), whole)
    shares = [numbers(make(), BatchShard(rank, 2, 1)) for rank in range(2)]
    together = torch.stack([share.reshape(7, 2, 9) for share in shares], 1).reshape(28, 9)
    assert torch.equal(together, whole)


@pytest.mark.parametrize("stride", [None, 8, 5, 1])
@pytest.mark.parametrize("count", [2, 9, 10, 30])
def test_perplexity_by_a_sliding_window_written_out(stride, count):
    tokens = np.random.default_rng(count).integers(0, 50, count).tolist()
    model, task = small_model(), task_of(range(50), val=tokens, eval_stride=stride)
    nll, scored, position = 0.0, [], 1
    while position < count:
        end = min(position + (8 if position == 1 else stride or 8), count)
        begin = max(end - 9, 0)
        logits = model(torch.tensor([tokens[begin : end - 1]])).logits[0].log_softmax(-1)
        for target in range(position, end):
            nll -= logits[target - begin - 1, tokens[target]].item()
            scored.append(target)
        position = end
    assert scored == list(range(1, count))
    got = task.evaluate(model, BatchShard(), CPU)
    assert got["loss"] == pytest.approx(nll / (count - 1), rel=1e-5)
    assert got["perplexity"] == pytest.approx(math.exp(got["loss"]))
    assert got["word_perplexity"] == pytest.approx(math.exp(nll / (count // 2)), rel=1e-4)
    assert got["bits_per_character"] == pytest.approx(nll / math.log(2) / (3 * count), rel=1e-5)


def test_clean_samples_are_the_first_of_the_training_text():
    rng, model = np.random.default_rng(0), small_model()
    train, val = rng.integers(0, 50, 60).tolist(), rng.integers(0, 50, 60).tolist()
    scores = task_of(train, val=val, clean_samples=2).evaluate(model, BatchShard(), CPU)
    alone = task_of(train, val=train[:17]).evaluate(model, BatchShard(), CPU)
    assert scores["train_clean_loss"] == pytest.approx(alone["loss"]) != pytest.approx(scores["loss"])


def test_smaller_batches_of_evaluation_change_nothing():
    model, sizes = small_model(), []
    model.register_forward_pre_hook(lambda _, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True)
    whole, small = (
        task_of(range(50), eval_batch_size=size).evaluate(model, BatchShard(), CPU)["loss"] for size in (32, 3)
    )
    assert sizes == [7, 3, 3, 1] and small == pytest.approx(whole, rel=1e-6)


def test_the_loss_is_transformers(text):
    model, task = small_model(), task_of(range(50))
    batch = next(task.batches(0, 0, BatchShard(), CPU))
    loss, _ = task.loss(model, batch)
    assert loss.item() == pytest.approx(model(batch, labels=batch).loss.item(), rel=1e-6)


def command(text, folder, *arguments):
    words = ["train", "python-docs/tiny", "--data", f"text:{text}", "--run", str(folder), *SMALL, *arguments]
    return [sys.executable, "-m", "stepsnet", *words]


def test_a_run_from_the_command_line(trained, text, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = trained
    assert main([*command(text, run, "--resume")[3:]]) == 0  # it has ended, and is left as it is
    assert "validation perplexity" in capsys.readouterr().out
    summary = json.loads((run / "summary.json").read_text())
    assert summary["blocks"] == 2 and summary["widths"] == [16, 32] and summary["vocab_size"] == 280
    (section,) = read_inspection(run)
    tokens = load_text(f"text:{text}", "bpe", 280).splits["val"].tokens
    body, decode = (text / "valid.txt").read_text(encoding="utf-8"), load_tokenizer(run / "tokenizer.json").decode
    first, middle = section.texts
    assert first.prompt == decode(tokens[:8].tolist()) and body.startswith(first.prompt + first.original)
    half = len(tokens) // 2
    assert middle.prompt + middle.original == decode(tokens[half : half + 168].tolist())
    assert all(one.continuation for one in section.texts) and first.continuation != middle.continuation
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "drawn at temperature 0.8 with seed 0" in page and printable(first.continuation) in html.unescape(page)
    assert main(["eval", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(summary["metrics"]["val_loss"], abs=1e-6)
    assert main(["eval", str(run), "eval_batch_size=2", "--data", f"text:{text}@test", "--stride", "4"]) == 0
    assert "perplexity per word" in capsys.readouterr().out
    (tmp_path / "other.txt").write_text("another text, with other words and another tokenizer. " * 50)
    assert main(["eval", str(run), "--data", f"text:{tmp_path / 'other.txt'}", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    body = (tmp_path / "other.txt").read_text()
    ids = AutoTokenizer.from_pretrained(run)(body).input_ids  # the run's own tokens
    model, windows = AutoModelForCausalLM.from_pretrained(run), [ids[i : i + 17] for i in range(0, len(ids) - 1, 16)]
    losses = [
        nn.functional.cross_entropy(model(torch.tensor([w[:-1]])).logits[0], torch.tensor(w[1:]), reduction="sum")
        for w in windows
    ]
    assert other["loss"] == pytest.approx(sum(losses).item() / (len(ids) - 1), abs=1e-4)
    assert main(["predict", str(run), "--prompt", "step by", "--tokens", "9", "--temperature", "0"]) == 0
    written = capsys.readouterr().out
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    ids = tokenizer("step by", return_tensors="pt").input_ids
    expected = tokenizer.decode(model.generate(ids, max_new_tokens=9, do_sample=False)[0])
    assert written == expected + "\n"
    for arguments, message in (
        (["--prompt", "step " * 300], r"expected at most 256 together, the model's context"),
        (["--prompt", "step", "--temperature", "nan"], "--temperature: got nan, expected a finite number"),
        (["--prompt", "step", "--temperature", "inf"], "--temperature: got inf, expected a finite number"),
        (["--prompt", "step\udcff"], r"--prompt: got 'step\udcff', expected text in UTF-8"),
        (["--prompt", ""], "--prompt: got '', expected some text"),
        ([], "expected either images, or --prompt"),
        (["picture.png"], "is a run of language, expected --prompt TEXT, or for images a run of classification"),
    ):
        assert main(["predict", str(run), *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["eval", str(run), "--stride", "0"]) == 2
    assert "argument --stride: got 0, expected 1 to" in capsys.readouterr().err
    assert main(["eval", str(run), "--data", f"text:{text}@dev"]) == 2
    assert "has no split 'dev', expected one of train, val, test" in capsys.readouterr().err


def test_the_report_shows_a_model_with_the_context_that_it_was_trained_at(text, tmp_path):
    """Its config has fewer positions than ``seq_len``, and the task raises them."""
    changes = ["model.args.max_position_embeddings=4", "epochs=1", "epoch_updates=2"]
    assert main(command(text, tmp_path / "run", *changes)[3:]) == 0
    (section,) = read_inspection(tmp_path / "run")
    assert all(one.continuation for one in section.texts)


def test_the_perplexity_per_word_of_a_text_without_spaces_is_left_out():
    model, tokens = small_model(), np.random.default_rng(0).integers(0, 50, 60).tolist()
    task = task_of(tokens)
    assert "word_perplexity" in task.evaluate(model, BatchShard(), CPU)
    task.text.splits["val"] = replace(task.text.splits["val"], words=2)
    assert task.evaluate(model, BatchShard(), CPU).keys() == {"loss", "perplexity", "bits_per_character"}


def test_characters_that_were_never_seen_are_said(tmp_path):
    (tmp_path / "text.txt").write_text("abcd efgh\n" * 180 + "zbcd\n" * 40)
    data = load_text(f"text:{tmp_path / 'text.txt'}", "characters", None)
    trained, evaluated = (LanguageModelling(recipe_of(2, 16), data, "val", training) for training in (True, False))
    (line,) = trained.remarks()
    assert line.startswith("40 of 200 tokens of val are not in the vocabulary and all become <unk>: ")
    assert (trained.notices(), evaluated.notices()) == ([], [line])  # before a training it is a remark
    assert evaluated.notices() == []  # it was said, such as with an earlier row of an analysis
    assert LanguageModelling(recipe_of(2, 16), data, "train").remarks() == []
    model = small_model(vocab_size=data.tokenizer.get_vocab_size())
    data.tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"--prompt: got the characters 'xz', for which .* has no tokens"):
        predict.predict(tmp_path, None, PredictInputs(prompt="abzx", model=model))


@pytest.mark.parametrize("kind, vocab_size", [("bpe", 280), ("characters", None)])
def test_streamed_text_loses_no_character(text, kind, vocab_size):
    """Also of bytes that are no characters, and of characters in several tokens."""
    tokenizer, emitted = load_text(f"text:{text}", kind, vocab_size).tokenizer, []
    streamer = predict._Streamer(tokenizer, PredictInputs(prompt="step β ", emit=emitted.append))
    prompt = tokenizer.encode("step β ").ids
    drawn = np.random.default_rng(0).integers(2, tokenizer.get_vocab_size(), 300).tolist()
    generated = drawn + tokenizer.encode("naïve β\nby  step").ids
    streamer.put(torch.tensor([prompt]))
    for token in generated:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(emitted) == streamer.text == "step β " + tokenizer.decode(generated)
    assert len(emitted) > 10


def test_lm_evaluation_harness_scores_a_run(trained, tmp_path):
    """Its own command, which knows nothing of stepsnet, on a task from a local file."""
    run, tasks = trained, tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "rows.jsonl").write_text("".join(json.dumps({"text": f"step by step {i}"}) + "\n" for i in range(3)))
    (tasks / "tiny.yaml").write_text(
        "task: tiny\ndataset_path: json\noutput_type: loglikelihood_rolling\ntest_split: train\n"
        f"dataset_kwargs:\n  data_files: {tasks / 'rows.jsonl'}\n"
        "doc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list:\n  - metric: word_perplexity\nmetadata:\n  version: 1.0\n"
    )
    words = ["-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={run},trust_remote_code=True"]
    words += [
        "--tasks",
        "tiny",
        "--include_path",
        str(tasks),
        "--device",
        "cpu",
        "--output_path",
        str(tmp_path / "out"),
    ]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = (tmp_path / "out").rglob("results_*.json")
    perplexity = json.loads(found.read_text())["results"]["tiny"]["word_perplexity,none"]
    assert 1 < perplexity < math.inf


def test_a_killed_run_ends_as_if_it_had_not_been(trained, text, tmp_path):
    killed = tmp_path / "killed"
    process = subprocess.Popen(command(text, killed, "checkpoint_interval=1"), stdout=subprocess.DEVNULL)
    while not list(killed.glob("checkpoints/step-*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (killed / "summary.json").exists()
    assert main(command(text, killed, "--resume")[3:]) == 0
    ours, theirs = load_file(killed / "model.safetensors"), load_file(trained / "model.safetensors")
    assert "lm_head.weight" not in theirs and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("content", "arguments", "expected"),
    [
        (b"", [], "is empty, expected text"),
        (b"   \n ", [], "is empty, expected text"),
        (b"abc\xff\xfe", [], r"it is not UTF-8 \(line 1\)"),
        (b"abc\0def", [], r"it has a zero byte \(line 1\), expected text"),
        (b"ab " * 40, [], "vocab_size: got 280, expected at most the 2.. that this text gives"),
        (
            b"ab " * 20,
            ["tokenizer=characters"],
            r"got 54 training tokens, expected at least \(batch_size \+ 1\) × seq_len, 5×16",
        ),
        (b"ab " * 40, ["tokenizer=characters", "clean_samples=7"], "clean_samples: got 7, expected at most the 6 "),
        (None, [], "cannot read .*: No such file or directory"),
        (b"step by step, the network widens. " * 400, ["model.args.vocab_size=20", "tokenizer=characters"], None),
        (b"abc", ["vocab_size=100"], "vocab_size: got 100, expected at least 257"),
        (b"abc", ["eval_stride=17"], "."),
        (
            b"ab " * 40,
            ["tokenizer=characters", "model.args.vocab_size=null"],
            "Field 'vocab_size' expected int, got NoneType",
        ),
    ],
)
def test_text_that_does_not_fit_is_refused(tmp_path, capsys, content, arguments, expected):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    words = ["train", "python-docs/tiny", "--data", f"text:{path}", "--run", str(tmp_path / "run"), *SMALL, *arguments]
    if expected is None:  # a vocabulary that is large enough, then one that is not
        assert main([*words, "epochs=1"]) == 0
        capsys.readouterr()
        pair = ["compare", "tinyshakespeare/shallow", *words[2:], "--run", str(tmp_path / "pair"), "epochs=1"]
        assert main([*pair, "baseline.args.vocab_size=9"]) == 2
        assert re.search(r"baseline.args.vocab_size: got 9, expected at least the tok", capsys.readouterr().err)
        assert main([*words, "model.args.vocab_size=9", "--run", str(tmp_path / "other")]) == 2
        expected = r"model.args.vocab_size: got 9, expected at least the tokenizer's \d+"
    else:
        assert main(words) == 2
    err = capsys.readouterr().err
    assert re.search(expected, err) and err.count("\n") == 1, err


def test_a_folder_without_validation_is_refused(tmp_path):
    (tmp_path / "train.txt").write_text("words")
    with pytest.raises(UserError, match=r"has no valid.txt, expected train.txt, valid.txt and optionally test.txt"):
        load_text(f"text:{tmp_path}", "bpe", 300)


@pytest.mark.parametrize("kind", ["text", "hfds"])
def test_a_training_split_alone_is_enough_with_holdout(kind, tmp_path):
    body = "".join(f"line {number} of some words\n" for number in range(40))
    if kind == "text":
        (tmp_path / "train.txt").write_text(body)
    else:
        pytest.importorskip("datasets")
        (tmp_path / "train.jsonl").write_text(
            "".join(json.dumps({"text": f"{row}\n"}) + "\n" for row in body.split("\n")[:-1])
        )
    data = load_text(f"{kind}:{tmp_path}", "characters", None, holdout=0.25)
    read = {name: data.tokenizer.decode(split.tokens.tolist()) for name, split in data.splits.items()}
    assert read == {"train": body[: round(0.75 * len(body))], "val": body[round(0.75 * len(body)) :]}
    with pytest.raises(UserError, match=r"a recipe with holdout=0\.1 validates on the last tenth of train"):
        load_text(f"{kind}:{tmp_path}", "characters", None)
    with pytest.raises(UserError, match="has no test split besides the one to validate on, which holdout takes"):
        load_text(f"{kind}:{tmp_path}", "characters", None, holdout=0.25, needed=("train", "test"))


def test_a_text_is_read_only_for_tokens_that_are_not_in_the_cache(text, monkeypatch):
    first = load_text(f"text:{text}", "characters", None)

    def refuse(*_):
        raise AssertionError("read again")

    monkeypatch.setattr("stepsnet.tasks.language.sources.read_text", refuse)
    again = load_text(f"text:{text}", "characters", None)
    for name, split in first.splits.items():
        assert again.splits[name].tokens.filename == split.tokens.filename
        assert (again.splits[name].characters, again.splits[name].words) == (split.characters, split.words)


def test_words_are_counted_across_pieces(tmp_path, monkeypatch):
    """A line that is longer than a piece is cut, perhaps inside a word."""
    monkeypatch.setattr("stepsnet.tasks.language.data._CHUNK", 7)
    body = "a longer line of several words \n and  another-word-without-space\n" * 4
    (tmp_path / "train.txt").write_text(body)
    (tmp_path / "valid.txt").write_text(body[:-3])
    splits = load_text(f"text:{tmp_path}", "characters", None).splits
    assert splits["train"].words == len(body.split()) and splits["val"].words == len(body[:-3].split())


def test_line_ends_are_those_of_other_systems(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n" + b"three\r\n" * 40)
    data = load_text(f"text:{tmp_path / 'text.txt'}", "characters", None)
    assert data.tokenizer.decode(data.splits["train"].tokens.tolist()).startswith("one\ntwo\nthree\n")
    assert "\r" not in data.tokenizer.get_vocab()


def test_hugging_face_text_is_read(tmp_path):
    lines = [f"line {i} of some words" for i in range(30)]
    for name, part in (("train", lines[:20]), ("validation", lines[20:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": line + "\n"}) + "\n" for line in part))
    data = load_text(f"hfds:{tmp_path}", "characters", None)
    assert data.tokenizer.decode(data.splits["train"].tokens.tolist()) == "".join(f"{line}\n" for line in lines[:20])
    for name, part in (("train", lines[:20]), ("validation", lines[20:])):  # rows without a line's end are documents
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in part))
    data = load_text(f"hfds:{tmp_path}", "characters", None)
    read = data.tokenizer.decode(data.splits["train"].tokens.tolist(), skip_special_tokens=False)
    assert read.count(END_OF_TEXT) in (19, 20) and read.replace(END_OF_TEXT, "") == "".join(lines[:20])
    (tmp_path / "train.jsonl").write_text('{"text": "a line"}\n{"text": null}\n{"text": "another"}\n')
    data = load_text(f"hfds:{tmp_path}", "characters", None)
    read = data.tokenizer.decode(data.splits["train"].tokens.tolist(), skip_special_tokens=False)
    assert read == f"a line{END_OF_TEXT}{END_OF_TEXT}another"


def test_rows_that_hold_several_lines_are_documents(tmp_path):
    """As code does, every file of which ends with a newline; the splits of a data set are read alike."""
    pytest.importorskip("datasets")
    rows = {"train": ["def f():\n    pass\n", "x = 1\n"], "validation": ["x = 1\n", "pass\n"]}
    for name, part in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in part))
    data = load_text(f"hfds:{tmp_path}", "characters", None)
    for name, part in (("train", rows["train"]), ("val", rows["validation"])):
        read = data.tokenizer.decode(data.splits[name].tokens.tolist(), skip_special_tokens=False)
        assert read == END_OF_TEXT.join(part)
    assert data.notices == ()
    rows["train"] = ["x = 1\n", "x = 2\n"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows["train"]))
    data = load_text(f"hfds:{tmp_path}", "characters", None)
    assert data.tokenizer.decode(data.splits["train"].tokens.tolist()) == "x = 1\nx = 2\n"
    assert data.notices == (f"hfds:{tmp_path}: every row is a line, so the rows of a split are read as one text",)


def test_text_in_another_column(tmp_path):
    pytest.importorskip("datasets")
    for name in ("train", "validation"):
        rows = [{"content": f"{name} {number}", "stars": number} for number in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load_text(f"hfds:{tmp_path}::content", "characters", None)
    read = data.tokenizer.decode(data.splits["train"].tokens.tolist(), skip_special_tokens=False)
    assert read == END_OF_TEXT.join(f"train {number}" for number in range(3))
    for column in ("", "::stars"):
        expected = r"got the columns content: string, stars: int64, expected (text|stars): string \(hfds:NAME::COLUMN"
        with pytest.raises(UserError, match=expected):
            load_text(f"hfds:{tmp_path}{column}", "characters", None)


def test_texts_that_end_elsewhere_are_others(tmp_path):
    pytest.importorskip("datasets")
    found = []
    for documents in (["ab", "c"], ["a", "bc"], ["a", "bc"]):
        (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
        found.append(open_texts(f"hfds:{tmp_path}").splits["train"].fingerprint)
    assert found[0] != found[1] == found[2]
