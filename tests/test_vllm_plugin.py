"""The plugin: what it registers, what it leaves alone, and what it never imports.

vLLM is a stub here: a registry, and a host that builds a tower and loads it.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm_support import (
    CONFIG,
    MERGER_OUT,
    VllmTower,
    golden_tensors,
    images,
    multimodal_config,
    vllm_config,
)

from m3compile.errors import ArtifactIncompatibleError, ArtifactNotFoundError, RequestError
from m3compile.integrations.vllm import EncoderMixin
from m3compile.integrations.vllm.plugin import ARCHITECTURE, ARTIFACT_VARIABLE, HOST, register

MODEL = "m3compile.integrations.vllm.model"


class Registry:
    def __init__(self) -> None:
        self.models: dict[str, Any] = {ARCHITECTURE: "vLLM's", "AnotherModel": "another"}

    def get_supported_archs(self) -> Iterable[str]:
        return self.models.keys()

    def register_model(self, architecture: str, model: Any) -> None:
        self.models[architecture] = model


class StubHost(nn.Module):
    """The host's constructor and loader, as vLLM's, with nothing but the tower."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.multimodal_config = vllm_config.model_config.multimodal_config
        self.use_data_parallel = False
        self.vision_tower = VllmTower()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        tensors = dict(weights)
        self.vision_tower.load(tensors)
        return set(tensors)

    def embed_multimodal(self, **kwargs: Any) -> Any:
        raise AssertionError("the host's own encoder ran")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """A stub of vLLM for as long as a test runs."""
    found = Registry()
    vllm, models = ModuleType("vllm"), ModuleType("vllm.models")
    minimax = ModuleType("vllm.models.minimax_m3")
    vllm.ModelRegistry = found  # type: ignore[attr-defined]
    vllm.models = models  # type: ignore[attr-defined]
    models.minimax_m3 = minimax  # type: ignore[attr-defined]
    minimax.MiniMaxM3SparseForConditionalGeneration = StubHost  # type: ignore[attr-defined]
    for module in (vllm, models, minimax):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield found
    sys.modules.pop(MODEL, None)


def test_nothing_without_an_artifact(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(registry.models)
    monkeypatch.delenv(ARTIFACT_VARIABLE, raising=False)
    register()
    monkeypatch.setenv(ARTIFACT_VARIABLE, "")
    register()
    assert registry.models == before


def test_the_swap(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, golden_artifact: Path
) -> None:
    """Twice, as vLLM may; other models stay. The swapped host keeps its class's name."""
    monkeypatch.setenv(ARTIFACT_VARIABLE, str(golden_artifact))
    register()
    register()
    assert registry.models == {ARCHITECTURE: HOST, "AnotherModel": "another"}
    host_class = load_host()
    assert host_class.__name__ == ARCHITECTURE
    assert issubclass(host_class, EncoderMixin)
    assert issubclass(host_class, StubHost)


def test_a_wrong_path_stops_the_start(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(ARTIFACT_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(ArtifactNotFoundError, match="none"):
        register()
    assert registry.models[ARCHITECTURE] == "vLLM's"


def test_a_vllm_without_the_model(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, golden_artifact: Path
) -> None:
    monkeypatch.setenv(ARTIFACT_VARIABLE, str(golden_artifact))
    del registry.models[ARCHITECTURE]
    with pytest.raises(RequestError, match="does not know"):
        register()


def load_host() -> Any:
    module, _, name = HOST.partition(":")
    return getattr(importlib.import_module(module), name)


def start(config: dict[str, Any] = CONFIG) -> Any:
    options = vllm_config(mm=multimodal_config())
    options.model_config.hf_config = config
    return load_host()(vllm_config=options, prefix=""), options


def test_a_host_from_start_to_embeddings(
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    golden_artifact: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(ARTIFACT_VARIABLE, str(golden_artifact))
    with caplog.at_level("INFO", "vllm"):
        host, options = start()
    assert f"vision encoder from {golden_artifact}, captured by vllm" in caplog.text
    assert options.compilation_config.encoder_cudagraph_token_budgets == [16, 64, 256, 576]
    assert host.load_weights(golden_tensors().items()) == set(golden_tensors())
    (embedding,) = host.embed_multimodal(**images([(1, 4, 4)]))
    assert embedding.shape == (4, 96)
    # The same weights may be loaded again, others not.
    host.load_weights(golden_tensors().items())
    other = golden_tensors()
    other[f"{MERGER_OUT}bias"] = other[f"{MERGER_OUT}bias"] + 1
    with pytest.raises(ArtifactIncompatibleError, match=r"patch_merge_mlp\.linear_2\.bias"):
        host.load_weights(other.items())
    with pytest.raises(ArtifactIncompatibleError, match=r"patch_merge_mlp\.linear_2\.bias"):
        host.embed_multimodal(**images([(1, 4, 4)]))


def test_a_mismatch_stops_the_start(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, golden_artifact: Path
) -> None:
    """A config before weights are loaded, weights as soon as they are; dummy ones at first use."""
    monkeypatch.setenv(ARTIFACT_VARIABLE, str(golden_artifact))
    vision = {**CONFIG["vision_config"], "rope_theta": 5000.0}
    with pytest.raises(ArtifactIncompatibleError, match=r"rope_theta is 5000\.0 in"):
        start({**CONFIG, "vision_config": vision})
    host, _ = start()
    tensors = {name: torch.zeros_like(tensor) for name, tensor in golden_tensors().items()}
    with pytest.raises(ArtifactIncompatibleError, match="not this host's weights"):
        host.load_weights(tensors.items())
    host, _ = start()
    with pytest.raises(ArtifactIncompatibleError, match="not this host's weights"):
        host.embed_multimodal(**images([(1, 4, 4)]))


def test_the_entry_point() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split('[project.entry-points."vllm.general_plugins"]')[1]
    found = re.match(r'\s*m3compile = "([\w.]+):(\w+)"', section)
    assert found is not None
    assert getattr(importlib.import_module(found[1]), found[2]) is register


def test_vllm_is_imported_by_nobody_else() -> None:
    """In a process where an import of vLLM is an error that nobody catches."""
    program = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            raise AssertionError("vllm was imported")
sys.meta_path.insert(0, Blocker())
import m3compile.integrations.vllm
assert "torch" not in sys.modules
from m3compile.integrations.vllm.plugin import register
register()
assert "torch" not in sys.modules
import m3compile, m3compile.loading, m3compile.__main__
from m3compile.integrations.vllm import EncoderMixin
"""
    environment = {"PATH": "", "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
