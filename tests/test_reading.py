"""Files from outside: what YAML and JSON may hold, and every way of being unreadable as one line."""

import os

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepsnet.errors import UserError
from stepsnet.files.reading import parse_json, parse_yaml, read_json, read_text, read_yaml
from stepsnet.files.writing import dump_json, dump_yaml
from stepsnet.recipes import RECIPES
from stepsnet.settings.overrides import to_plain

# PyYAML's dumper folds U+0085, U+2028 and U+2029 as line breaks
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029"))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(PLAIN)
@example(["1e-3", "1:30", "no", "2026-01-01", "~", "0x1F", "0o7", "010", "1_000", "=", "<<", "y", ".nan", "+1", ""])
def test_what_is_dumped_is_read_back_by_both_versions_of_yaml(value):
    assert parse_yaml(dump_yaml(value), "x") == value
    assert yaml.safe_load(dump_yaml(value)) == value


def test_what_is_dumped_is_json_for_every_reader():
    dumped = dump_json({"a": [1, float("nan")], "b": (float("inf"), {"c": -0.5})})
    assert parse_json(dumped, "x") == {"a": [1, None], "b": [None, {"c": -0.5}]}


def test_every_recipe_comes_back():
    for recipe in RECIPES.values():
        values = to_plain(recipe)
        assert parse_yaml(dump_yaml(values), "x") == values == yaml.safe_load(dump_yaml(values))


def test_numbers_are_those_of_yaml_1_2():
    text = "a: 1e-3\nb: 1:30\nc: no\nd: 2026-01-01\ne: 0x10\nf: 010\ng: 1_000\nh: +.5\ni:\nj: ~\nk: .inf\nl: on\n"
    expected = [0.001, "1:30", "no", "2026-01-01", 16, 10, "1_000", 0.5, None, None, float("inf"), "on"]
    assert list(parse_yaml(text, "x").values()) == expected


ALIASES = "b0: &b0 [1, 1]\n" + "".join(f"b{n}: &b{n} [*b{n - 1}, *b{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: 2\na: 3", r"the key 'a' is given twice \(line 3, column 1\)"),
        ("a: &x [*x]", "an alias refers to something that contains it"),
        (ALIASES, "it stands for more than 100,000 values"),
        ("? [1]\n: 2", r"a key is not text \(line 1, column 3\)"),
        ("a: !!python/object:os.system x", "could not determine a constructor for the tag"),
        ("a: !!binary aGk=", "could not determine a constructor for the tag"),
        ("a: !!set {x}", "could not determine a constructor for the tag"),
        ("a: [", r"expected the node content, but found '<stream end>' \(line 1, column 5\)"),
        ("a: " + "9" * 5000, "Exceeds the limit"),
        ("[" * 2000, "it is nested too deeply"),
        ("[" * 150 + "]" * 150, "it has more than 100 levels"),
        ("a: \x01", "unacceptable character"),
        ("- a\n- b\n", "x: got list in .*, expected a mapping of keys to values"),
    ],
)
def test_a_mistake_in_yaml_is_one_line(tmp_path, text, expected):
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(UserError, match=expected) as caught:
        read_yaml(tmp_path / "file.yaml", "x")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1,}', r"line 1, column 9"),
        ("[1", r"line 1, column 3"),
        ("", r"Expecting value \(line 1, column 1\)"),
        ("[NaN]", "NaN is not JSON, expected a number or null"),
        ("-Infinity", "-Infinity is not JSON"),
        ("9" * 5000, "Exceeds the limit"),
        ("[" * 100_000, "it is nested too deeply"),
    ],
)
def test_a_mistake_in_json_is_one_line(text, expected):
    with pytest.raises(UserError, match=f"^data: {expected}|^data: .*{expected}") as caught:
        parse_json(text, "data")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_every_way_of_being_unreadable_is_one_line(tmp_path):
    (tmp_path / "latin").write_bytes(b"a\nb\nn\xe4me")
    (tmp_path / "zero").write_bytes(b"a\nb\0c")
    (tmp_path / "mark").write_bytes(b"\xef\xbb\xbf[1]")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for name, reason in {
        "latin": r"it is not UTF-8 \(line 3\)",
        "zero": r"it has a zero byte \(line 2\), expected text",
        "loop": "Too many levels of symbolic links",
        "pipe": "it is not a file",
        ".": "it is not a file",
        "none": "No such file or directory",
        "x" * 300: "File name too long",
        "a\0b": "embedded null byte",
    }.items():
        with pytest.raises(UserError, match=f"^data: cannot read .*: {reason}"):
            read_text(tmp_path / name, "data")
    assert read_json(tmp_path / "mark", "data", list) == [1]
    with pytest.raises(UserError, match=r"^data: got list in .*mark, expected a mapping of keys to values"):
        read_json(tmp_path / "mark", "data", dict)
