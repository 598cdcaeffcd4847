"""Managers that drive a host through vLLM's encoder CUDA-graph protocol, and graphs for a CPU.

`OwnManager` is vLLM's, where M3COMPILE_VLLM_PATH names its wheel (or an unpacked one). `Manager`
is written from the protocol's description: budgets, one capture per budget, greedy packing of the
smallest items first, a copy with the padding logic, replay, cut, reorder, and the way without a
graph for what no budget holds.
"""

from __future__ import annotations

import importlib.util
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

WHEEL = os.environ.get("M3COMPILE_VLLM_PATH")


class CpuGraph:
    """Stands for a CUDA graph: `replay` runs again what ran while it was captured.

    Records calls of a recorded forward, and tensor operations on its result; the output keeps its
    memory, as a graph's does.
    """

    capturing: CpuGraph | None = None

    def __init__(self) -> None:
        self.steps: list[Callable[[], Any]] = []

    def replay(self) -> None:
        for step in self.steps:
            step()


@contextmanager
def cpu_capture(graph: CpuGraph, pool: Any = None, stream: Any = None) -> Iterator[None]:
    """In place of `torch.cuda.graph`."""
    CpuGraph.capturing = graph
    try:
        yield
    finally:
        CpuGraph.capturing = None


class _Recorded(Tensor):
    """The result of a captured call."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        plain = [arg.as_subclass(Tensor) if isinstance(arg, cls) else arg for arg in args]
        if CpuGraph.capturing is not None and func.__name__ == "copy_":
            CpuGraph.capturing.steps.append(partial(func, *plain, **(kwargs or {})))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*plain, **(kwargs or {}))


class Recorder:
    """A host whose `encoder_cudagraph_forward` can be recorded; all else is the host's."""

    def __init__(self, host: Any) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        held = dict(inputs)
        output: Tensor = self._host.encoder_cudagraph_forward(inputs, path)
        graph = CpuGraph.capturing
        if graph is None:
            return output
        graph.steps.append(
            lambda: output.copy_(self._host.encoder_cudagraph_forward(dict(held), path))
        )
        return output.as_subclass(_Recorded)


class Manager:
    """The protocol's other side.

    Args:
        host: what is driven.
        config: vLLM's, as `vllm_support.vllm_config`.
        device, dtype: what the host runs in.
        make_graph, capture: `torch.cuda`'s, or the CPU's.
    """

    def __init__(
        self,
        host: Any,
        config: Any,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        make_graph: Callable[[], Any] = CpuGraph,
        capture: Callable[..., Any] = cpu_capture,
    ) -> None:
        self.host = Recorder(host) if make_graph is CpuGraph else host
        self.config = host.get_encoder_cudagraph_config()
        options = config.compilation_config
        low, high = host.get_encoder_cudagraph_budget_range(config)
        self.budgets = sorted(options.encoder_cudagraph_token_budgets) or _doubling(low, high)
        self.max_items = options.encoder_cudagraph_max_vision_items_per_batch or min(
            high // low, self.budgets[0]
        )
        assert self.max_items <= self.budgets[0]
        self.max_frames = self.max_items * self.config.max_frames_per_video
        self.device, self.dtype = torch.device(device), dtype
        self.hits = self.misses = 0
        self._make_graph, self._capture = make_graph, capture
        self._graphs: dict[int, tuple[Any, dict[str, Tensor], Tensor]] = {}

    def capture(self) -> None:
        with torch.inference_mode():
            for budget in reversed(self.budgets):
                values = self.host.prepare_encoder_cudagraph_capture_inputs(
                    budget, self.max_items, self.max_frames, self.device, self.dtype, "default", ()
                ).values
                assert set(values) == set(self.config.buffer_keys)
                output = torch.empty_like(self.host.encoder_cudagraph_forward(dict(values)))
                graph = self._make_graph()
                with self._capture(graph):
                    output.copy_(self.host.encoder_cudagraph_forward(dict(values)))
                self._graphs[budget] = (graph, values, output)

    def execute(self, mm_kwargs: dict[str, Any]) -> list[Tensor]:
        """One tensor an item, in the batch's order."""
        assert self.host.get_input_modality(mm_kwargs) in self.config.modalities
        with torch.inference_mode():
            specs = self.host.get_encoder_cudagraph_item_specs(mm_kwargs)
            tokens = [spec.output_tokens for spec in specs]
            results: dict[int, Tensor] = {}
            for indices, budget in self._pack(specs):
                batch = self.host.select_encoder_cudagraph_items(mm_kwargs, indices)
                if budget is None:
                    output = self.host.encoder_eager_forward(batch)
                    self.misses += len(indices)
                else:
                    output = self._replay(batch, budget)
                    self.hits += len(indices)
                self.host.postprocess_encoder_output(
                    {"default": output}, indices, tokens, results, True, batch
                )
            return [results[index] for index in range(len(specs))]

    def _pack(self, specs: list[Any]) -> Iterator[tuple[list[int], int | None]]:
        """Items of each run and its budget, the smallest items first."""
        batch: list[int] = []
        used = 0
        for index in sorted(range(len(specs)), key=lambda index: specs[index].output_tokens):
            price = specs[index].get_path_output_tokens("default")
            if batch and (len(batch) == self.max_items or used + price > self.budgets[-1]):
                yield batch, self._budget(used)
                batch, used = [], 0
            batch = [*batch, index]
            used += price
        if batch:
            yield batch, self._budget(used)

    def _budget(self, tokens: int) -> int | None:
        place = bisect_left(self.budgets, tokens)
        return self.budgets[place] if place < len(self.budgets) else None

    def _replay(self, batch: dict[str, Any], budget: int) -> Tensor:
        graph, buffers, output = self._graphs[budget]
        fresh = self.host.prepare_encoder_cudagraph_replay_buffers(
            batch, self.max_items, self.max_frames
        ).values
        for key, buffer in buffers.items():
            if fresh[key] is not None:
                self.config.padding_logics.get(key, _pad)(buffer, fresh[key])
        graph.replay()
        return output


def _pad(buffer: Tensor, value: Tensor) -> None:
    buffer.zero_()
    buffer[: len(value)].copy_(value)


def _doubling(low: int, high: int) -> list[int]:
    budgets = []
    while low < high:
        budgets.append(low)
        low *= 2
    return [*budgets, high]


class OwnManager:
    """vLLM's manager, unchanged, with graphs for a CPU; the same face as ours."""

    def __init__(self, module: ModuleType, host: Any, config: Any) -> None:
        cuda = SimpleNamespace(CUDAGraph=CpuGraph, graph=cpu_capture)
        module.torch = SimpleNamespace(  # type: ignore[attr-defined]
            **{name: getattr(torch, name) for name in ("inference_mode", "empty_like")}, cuda=cuda,
            cat=torch.cat, empty=torch.empty,
        )  # fmt: skip
        self._manager = module.EncoderCudaGraphManager(
            config, torch.device("cpu"), torch.float32, Recorder(host)
        )
        self.budgets = self._manager.token_budgets
        self.max_items = self._manager.max_batch_size

    def capture(self) -> None:
        self._manager.capture(graph_pool=None)

    def execute(self, mm_kwargs: dict[str, Any]) -> list[Tensor]:
        with torch.inference_mode():
            results: list[Tensor] = self._manager.execute(mm_kwargs)
        return results

    @property
    def hits(self) -> int:
        return int(self._manager.get_cumulative_stats()["graph_hits"])

    @property
    def misses(self) -> int:
        return int(self._manager.get_cumulative_stats()["graph_misses"])


def wheel_tool() -> ModuleType:
    """`tools/vllm_wheel.py`, where there is a wheel for it."""
    if not WHEEL:
        pytest.skip("M3COMPILE_VLLM_PATH names no vLLM wheel")
    path = Path(__file__).parents[1] / "tools" / "vllm_wheel.py"
    spec = importlib.util.spec_from_file_location("vllm_wheel", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


@contextmanager
def own_vllm(ranks: int = 1) -> Iterator[Any]:
    """What `tools/vllm_wheel.py` borrows from the wheel, and the ranks."""
    tool = wheel_tool()
    shared = tool.Ranks(ranks)
    with tool.borrowed(Path(str(WHEEL)), shared) as found:
        yield SimpleNamespace(ranks=shared, **vars(found))
