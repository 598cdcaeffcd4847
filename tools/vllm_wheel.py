"""vLLM's own encoder graph manager, taken from its wheel without installing vLLM.

The manager and the protocol's classes are pure Python, but import half of vLLM. `borrowed` runs
the manager's file as it stands, with the few functions it calls picked out of their files, and
stubs for configs, logging and the process group. `scale_reader` picks out how vLLM reads a file of
FP8 scales. For tests.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import logging
import math
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch

MANAGER = "vllm.v1.worker.encoder_cudagraph"
INTERFACES = "vllm.model_executor.models.interfaces"
VISION = "vllm.model_executor.models.vision"
ATTENTION = "vllm.model_executor.layers.attention.mm_encoder_attention"

# Whole files, and single definitions out of files that import too much.
_WHOLE = ("vllm.utils.math_utils", "vllm.v1.worker.encoder_cudagraph_defs", MANAGER)
_PICKED = {
    INTERFACES: ("SupportsEncoderCudaGraph",),
    "vllm.model_executor.models.utils": ("scatter_output_slices",),
    VISION: ("get_load_balance_assignment", "run_dp_sharded_mrope_vision_model"),
}


class Ranks:
    """Tensor-parallel ranks as threads of this process; each sets `here.rank` first."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.here = threading.local()
        self._barrier = threading.Barrier(size)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size

    def rank(self) -> int:
        return int(getattr(self.here, "rank", 0))

    def all_gather(self, part: torch.Tensor, dim: int = 0) -> torch.Tensor:
        self._parts[self.rank()] = part
        self._barrier.wait()
        gathered = torch.cat(self._parts, dim)
        self._barrier.wait()
        return gathered


@contextmanager
def borrowed(source: Path, ranks: Ranks | None = None) -> Iterator[SimpleNamespace]:
    """vLLM's manager, importable while the block runs.

    Args:
        source: a vLLM wheel, or a folder that one was unpacked to.
        ranks: of tensor parallelism; None for one.

    Yields:
        `manager` and `vision` (modules) and `protocol` (the runtime-checkable class).

    Raises:
        FileNotFoundError: `source` has no such file.
    """
    ranks = ranks or Ranks()
    before = {name: module for name, module in sys.modules.items() if _is_vllm(name)}
    for name in before:
        del sys.modules[name]
    try:
        names = _stub(ranks)
        for name, picks in _PICKED.items():
            _execute(name, _pick(read_module(source, name), picks), names)
        for name in _WHOLE:
            _execute(name, read_module(source, name), {})
        yield SimpleNamespace(
            manager=sys.modules[MANAGER],
            vision=sys.modules[VISION],
            protocol=sys.modules[INTERFACES].SupportsEncoderCudaGraph,
        )
    finally:
        for name in [name for name in sys.modules if _is_vllm(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def scale_reader(source: Path) -> Callable[[str], dict[str, dict[str, float]]]:
    """vLLM's reader of `--mm-encoder-fp8-scale-path`: q, k and v by layer name.

    Raises:
        FileNotFoundError: `source` has no such file.
    """
    logger = SimpleNamespace(info_once=lambda *_: None)
    names: dict[str, Any] = {"functools": functools, "json": json, "logger": logger}
    text = _pick(read_module(source, ATTENTION), ("_load_fp8_scales_file",))
    exec(compile(text, ATTENTION, "exec"), names)
    reader: Callable[[str], dict[str, dict[str, float]]] = names["_load_fp8_scales_file"]
    return reader


def _is_vllm(name: str) -> bool:
    return name == "vllm" or name.startswith("vllm.")


def read_module(source: Path, module: str) -> str:
    """The text of a module of the wheel."""
    path = module.replace(".", "/") + ".py"
    if source.is_dir():
        return (source / path).read_text(encoding="utf-8")
    try:
        with zipfile.ZipFile(source) as wheel:
            return wheel.read(path).decode("utf-8")
    except KeyError:
        raise FileNotFoundError(f"{source}: has no {path}") from None


def _pick(text: str, names: tuple[str, ...]) -> str:
    tree = ast.parse(text)
    wanted = [node for node in tree.body if getattr(node, "name", None) in names]
    return "from __future__ import annotations\n" + "\n".join(map(ast.unparse, wanted))


def _module(name: str, **values: Any) -> ModuleType:
    """A module, and the packages above it, in `sys.modules`."""
    parent, _, leaf = name.rpartition(".")
    if parent:
        above = sys.modules.get(parent) or _module(parent)
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(values)
    sys.modules[name] = module
    if parent:
        setattr(above, leaf, module)
    return module


def _execute(name: str, text: str, names: dict[str, Any]) -> None:
    module = _module(name, **names)
    exec(compile(text, name, "exec"), vars(module))


def _stub(ranks: Ranks) -> dict[str, Any]:
    """Put the stubs in place; the names that picked definitions take from their files' imports."""
    distributed: dict[str, Callable[..., Any]] = {
        "get_tensor_model_parallel_rank": ranks.rank,
        "get_tensor_model_parallel_world_size": lambda: ranks.size,
        "tensor_model_parallel_all_gather": ranks.all_gather,
    }
    _module("vllm.config", VllmConfig=object)
    _module("vllm.distributed", **distributed)
    _module("vllm.logger", init_logger=logging.getLogger)
    _module("vllm.utils.gpu_sync_debug", gpu_sync_allowed=nullcontext)
    _module("vllm.utils.torch_utils", current_stream=lambda: None)
    return {
        "torch": torch,
        "itertools": itertools,
        "math": math,
        "ClassVar": ClassVar,
        "Literal": Literal,
        "Protocol": Protocol,
        "runtime_checkable": runtime_checkable,
        **distributed,
    }
