"""Fixtures that several files use."""

import random
import subprocess
import sys

import hypothesis
import numpy as np
import pytest
import torch
from forks import forked, status_of
from run_folders import train_all
from segmentation_images import write_camvid

from stepsnet import tasks
from stepsnet.metrics import METRICS
from stepsnet.residual import DESIGNS
from stepsnet.settings.config import RECIPE_TYPES
from stepsnet.tasks.classification.sources import SOURCES

# The same values on every machine and run; `pytest --hypothesis-profile=default` draws new ones
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")


def draw_the_same_numbers():
    """A test that passes on one machine passes on the next, and after any other test."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collectstart(collector):
    """What a test file draws on its import."""
    draw_the_same_numbers()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """What fixtures draw."""
    draw_the_same_numbers()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """What a test draws, whether or not it was the first to need its fixtures."""
    draw_the_same_numbers()


def pytest_pyfunc_call(pyfuncitem):
    """Run a test that forks and trains in a process of its own, where this one's autograd has threads.

    torch refuses backward passes after such a fork, and which tests start the threads depends on their order.
    """
    if not pyfuncitem.get_closest_marker("trains_in_a_fork") or can_train_in_a_fork():
        return None
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    done = subprocess.run(command, cwd=pyfuncitem.config.rootpath, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return True


def can_train_in_a_fork():
    return status_of(forked(lambda: torch.ones(1, requires_grad=True).sum().backward())) == 0


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A test finds nothing that another has cached."""
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def session_cache(tmp_path_factory, monkeypatch):
    """Tests share what is cached, for data that they do not change."""
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def grids_in_this_process(monkeypatch):
    """The runs of a comparison or a sweep are trained by :func:`train_all`."""
    monkeypatch.setattr("stepsnet.runs.grid.run_all", train_all)


@pytest.fixture
def own_registrations():
    """What a test registers with stepsnet is gone after it, and so are the modules and the folders on the path."""
    registries: tuple[dict, ...] = (RECIPE_TYPES, METRICS, SOURCES, tasks._registered, DESIGNS)
    before, modules, path = [dict(registry) for registry in registries], set(sys.modules), list(sys.path)
    yield
    for registry, entries in zip(registries, before):
        registry.clear()
        registry.update(entries)
    for name in [name for name in sys.modules if name.startswith("my_") and name not in modules]:
        del sys.modules[name]
    sys.path[:] = path


@pytest.fixture
def camvid(tmp_path):
    return write_camvid(tmp_path / "camvid")
