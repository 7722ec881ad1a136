"""Tests that need a GPU, and SGLang where their file says so: `pytest -m gpu tests/gpu` there."""

import importlib.util
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
TIMEOUT_S = 300


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_sglang = importlib.util.find_spec("sglang") is not None
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip("no GPU"))
        elif not has_sglang and item.path.name.startswith("test_sglang"):
            item.add_marker(pytest.mark.skip("sglang is not installed"))


@pytest.fixture
def second_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are started meanwhile see the second GPU alone; this process sees both."""
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    torch.cuda.init()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
