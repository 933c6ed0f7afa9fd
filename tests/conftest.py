"""Fixtures that several files use."""

import pytest
from segmentation_images import write_camvid


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A test finds nothing that another has cached."""
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def session_cache(tmp_path_factory, monkeypatch):
    """Tests share what is cached, for data that they do not change."""
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def camvid(tmp_path):
    return write_camvid(tmp_path / "camvid")
