"""The cache of what is computed once: damaged entries are made again, and a filled cache may be read-only."""

import errno
import json

import numpy as np
import pytest

from stepsnet.errors import UserError
from stepsnet.files.cache import cache_folder, cached_json
from stepsnet.run_folder.folder import lock_folder
from stepsnet.tasks.language.data import load_text


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))


def counted(value):
    calls = []

    def compute():
        calls.append(1)
        return value

    return compute, calls


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content.replace(b"[7", b"[8"),
        lambda content: b"\0" * len(content),
        lambda content: b"\xff" + content,
        lambda content: content.partition(b"\n")[2],  # as an earlier version wrote it
    ],
)
def test_a_damaged_entry_is_made_again_and_a_line_says_so(damage, capsys):
    compute, calls = counted({"sizes": [7, 7]})
    assert cached_json("kind/entry.json", compute) == cached_json("kind/entry.json", compute) == {"sizes": [7, 7]}
    assert len(calls) == 1 and capsys.readouterr() == ("", "")
    path = cache_folder() / "kind" / "entry.json"
    path.write_bytes(damage(path.read_bytes()))
    assert cached_json("kind/entry.json", compute) == {"sizes": [7, 7]} and len(calls) == 2
    line = f"stepsnet: the cache entry {path} is damaged or from an earlier version; it is made again"
    assert capsys.readouterr().err.splitlines() == [line]
    assert cached_json("kind/entry.json", compute) == {"sizes": [7, 7]} and len(calls) == 2


def test_a_filled_cache_needs_no_lock(monkeypatch):
    """As on a read-only file system that a cluster shares; root may write into read-only folders."""
    compute, calls = counted([1])
    cached_json("kind/entry.json", compute)

    def no_lock(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("stepsnet.files.cache.FileLock", no_lock)
    assert cached_json("kind/entry.json", compute) == [1] and len(calls) == 1
    with pytest.raises(UserError, match=r"^cannot write .*kind: Permission denied; set STEPSNET_CACHE to another"):
        cached_json("kind/other.json", compute)


def no_flock(*arguments):
    raise OSError(errno.ENOSYS, "Function not implemented")


def test_a_disk_without_locks_is_said_to_be_one(tmp_path, monkeypatch):
    """A file in the place of a lock would stay there for good where its process is killed."""
    monkeypatch.setattr("fcntl.flock", no_flock)
    with pytest.raises(UserError, match=r"its disk has no locks \(flock\); set STEPSNET_CACHE to another folder"):
        cached_json("kind/entry.json", lambda: 1)
    expected = r"^--run: got .*run, expected a folder on a disk that has locks \(flock\)$"
    with pytest.raises(UserError, match=expected), lock_folder(tmp_path / "run"):
        pass


def test_zeroed_tokens_are_never_trained_on(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("step by step, " * 300)
    data = load_text(f"text:{text}", "characters", None)
    expected = {name: np.array(split.tokens) for name, split in data.splits.items()}
    entries = [path for path in (cache_folder() / "text").iterdir() if path.is_dir()]
    held = {name: [entry for entry in entries if (entry / name).exists()] for name in ("tokens.bin", "tokenizer.json")}
    assert [len(found) for found in held.values()] == [2, 1]
    of_tokens, of_tokenizer = held["tokens.bin"][0], held["tokenizer.json"][0]
    for entry, name in (
        *((of_tokens, name) for name in ("tokens.bin", "facts.json", "SHA256SUMS")),
        (of_tokenizer, "tokenizer.json"),
    ):
        content = (entry / name).read_bytes()
        (entry / name).write_bytes({"tokens.bin": bytes(len(content)), "SHA256SUMS": b""}.get(name, content[:-1]))
        again = load_text(f"text:{text}", "characters", None)
        assert all(np.array_equal(again.splits[split].tokens, tokens) for split, tokens in expected.items())
        assert f"{entry} is damaged" in capsys.readouterr().err
    assert json.loads((of_tokens / "facts.json").read_text())["tokens"] in map(len, expected.values())


def test_a_user_without_a_home_has_a_cache(tmp_path, monkeypatch):
    """As in a container that runs under a number of its own; what somebody else has put there is not used."""
    monkeypatch.delenv("STEPSNET_CACHE")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("stepsnet.files.cache.Path.home", no_home)
    folder = cache_folder()
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700 and cache_folder() == folder
    folder.rmdir()
    (tmp_path / "theirs").mkdir()
    folder.symlink_to(tmp_path / "theirs", target_is_directory=True)
    with pytest.raises(UserError, match="set STEPSNET_CACHE to another folder"):
        cache_folder()
