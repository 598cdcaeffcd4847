"""The GPU backends of the attention op, on machines without their packages.

Each package is replaced by a stand-in that takes the arguments of the real function, keeps them,
computes with the float64 softmax the tests compare with, and leaves NaN in padding.
"""

from __future__ import annotations

import importlib.abc
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from attention_support import DIM, MIXED, as_bounds, inputs, largest_difference, naive
from helpers import run_fresh
from torch import Tensor

from m3compile.attention import backends, varlen_attention
from m3compile.config.backends import BACKENDS, REFUSED_BACKENDS
from m3compile.errors import ConfigError, DependencyError, M3CompileError

NAN = float("nan")
# Import names of every package that a backend may bring.
PACKAGES = ("aiter", "fa3_fwd_interface", "flash_attn", "flash_attn_interface", "flashinfer")


class ImportLog(importlib.abc.MetaPathFinder):
    """Notes which of `PACKAGES` somebody tries to import, and finds none of them."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in PACKAGES:
            self.asked.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def forget_backends() -> None:
    for value in vars(backends).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


@pytest.fixture
def import_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[ImportLog]:
    log = ImportLog()
    for name in list(sys.modules):
        if name.partition(".")[0] in PACKAGES:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [log, *sys.meta_path])
    forget_backends()
    yield log
    forget_backends()


class Kernel:
    """A stand-in for a package's varlen function: keeps its arguments, leaves padding NaN."""

    def __init__(self, signature: Callable[..., Any], wrap: Callable[[Tensor], Any]) -> None:
        self._signature = inspect.signature(signature)
        self._wrap = wrap
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        self.calls.append(given)
        q, k, v = given["q"], given["k"], given["v"]
        bounds = given["cu_seqlens_q"].tolist()
        result = naive(q, k, v, bounds).to(q.dtype)
        result[bounds[-1] :] = NAN
        return self._wrap(result)


def aiter_signature(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    min_seqlen_q: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, ...] = (-1, -1, 0),
) -> None: ...


def flash_attn_2_signature(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> None: ...


def flash_attn_3_signature(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    q_v: Tensor | None = None,
    out: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
) -> None: ...


def flash_attn_4_signature(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    num_splits: int = 1,
) -> None: ...


def same(result: Tensor) -> Tensor:
    return result


def with_softmax_sum(result: Tensor) -> tuple[Tensor, ...]:
    return result, torch.zeros(1)


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Put a package, and the packages around it, into `sys.modules`."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:depth]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(sys.modules[name]).update(members)


def install_aiter(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel(aiter_signature, same)
    install(monkeypatch, "aiter", flash_attn_varlen_func=kernel)
    return kernel


def install_flash_attn_2(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel(flash_attn_2_signature, same)
    install(monkeypatch, "flash_attn", flash_attn_varlen_func=kernel)
    return kernel


def install_flash_attn_4(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel(flash_attn_4_signature, with_softmax_sum)
    install(monkeypatch, "flash_attn.cute.interface", flash_attn_varlen_func=kernel)
    return kernel


def install_fa3_fwd(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel(flash_attn_3_signature, with_softmax_sum)
    install(monkeypatch, "fa3_fwd_interface")
    monkeypatch.setattr(torch.ops, "fa3_fwd", SimpleNamespace(fwd=kernel))
    return kernel


def install_flash_attn_interface(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel(flash_attn_3_signature, with_softmax_sum)
    install(monkeypatch, "flash_attn_interface")
    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(fwd=kernel))
    return kernel


STAND_INS = [
    ("ROCM_AITER_FA", install_aiter),
    ("FLASH_ATTN_2", install_flash_attn_2),
    ("FLASH_ATTN_3", install_fa3_fwd),
    ("FLASH_ATTN_3", install_flash_attn_interface),
    ("FLASH_ATTN_4", install_flash_attn_4),
]


@pytest.mark.parametrize(("name", "install_stand_in"), STAND_INS)
def test_what_a_backend_is_asked_for(
    name: str,
    install_stand_in: Callable[[pytest.MonkeyPatch], Kernel],
    import_log: ImportLog,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = install_stand_in(monkeypatch)
    q, k, v = inputs(160, dtype=torch.bfloat16)
    out = backends.run_on_cuda(q, k, v, as_bounds(MIXED), name)
    assert largest_difference(out, naive(q, k, v, MIXED)) < 2e-2
    assert not bool(out[MIXED[-1] :].any())

    (call,) = kernel.calls
    for tensor, key in ((q, "q"), (k, "k"), (v, "v")):
        assert torch.equal(call[key], tensor)
    for key in ("cu_seqlens_q", "cu_seqlens_k"):
        assert call[key].dtype == torch.int32
        assert call[key].tolist() == MIXED
    # A bucket's rows, never the longest segment: what is captured must not depend on the items.
    assert call["max_seqlen_q"] == call["max_seqlen_k"] == 160
    assert not call.get("causal", False)
    assert not call.get("is_causal", False)
    assert call.get("dropout_p", 0.0) == 0.0
    # None is a package's own default, head_dim ** -0.5.
    assert call["softmax_scale"] in (None, pytest.approx(DIM**-0.5))
    # Split over the keys, a result would depend on the whole batch.
    assert call.get("num_splits", 1) == 1


@pytest.mark.parametrize(("name", "install_stand_in"), STAND_INS)
def test_padding_may_stay_unwritten_where_nobody_reads_it(
    name: str,
    install_stand_in: Callable[[pytest.MonkeyPatch], Kernel],
    import_log: ImportLog,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_stand_in(monkeypatch)
    out = backends.run_on_cuda(*inputs(160), as_bounds(MIXED), name, False)
    assert bool(out[: MIXED[-1]].isfinite().all())
    assert bool(out[MIXED[-1] :].isnan().all())


def test_only_the_chosen_package_is_imported(
    import_log: ImportLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_aiter(monkeypatch)
    varlen_attention(*inputs(16), as_bounds([0, 16]), "TORCH_SDPA")
    assert import_log.asked == []
    backends.implementation("ROCM_AITER_FA")
    assert import_log.asked == []
    for name, packages in (
        ("FLASH_ATTN_2", {"flash_attn"}),
        ("FLASH_ATTN_3", {"fa3_fwd_interface", "flash_attn_interface"}),
        ("FLASH_ATTN_4", {"flash_attn"}),
    ):
        import_log.asked.clear()
        with pytest.raises(DependencyError):
            backends.implementation(name)
        assert {asked.partition(".")[0] for asked in import_log.asked} == packages


def test_importing_the_op_imports_no_backend() -> None:
    code = "import sys, m3compile.attention; print(*sys.modules)"
    assert {name.partition(".")[0] for name in run_fresh(code).split()}.isdisjoint(PACKAGES)


@pytest.mark.parametrize("name", [facts.name for facts in BACKENDS.values() if facts.distributions])
def test_a_package_that_is_not_installed(name: str, import_log: ImportLog) -> None:
    with pytest.raises(DependencyError, match=f"{name} needs the package") as caught:
        backends.run_on_cuda(*inputs(16), as_bounds([0, 16]), name)
    assert isinstance(caught.value, ImportError)
    assert any(package in str(caught.value) for package in BACKENDS[name].distributions)


@pytest.mark.parametrize("name", ["ROCM_AITER_FA", "FLASH_ATTN_2", "FLASH_ATTN_4"])
def test_another_package_of_the_same_import_name(
    name: str, import_log: ImportLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`aiter` is also a library of asynchronous iterators: not ours, and no crash."""
    for package in ("aiter", "flash_attn.cute.interface"):
        install(monkeypatch, package)
    with pytest.raises(DependencyError, match=f"{name} needs the package"):
        backends.implementation(name)


def test_the_family_is_its_best_installed_implementation(
    import_log: ImportLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = install_flash_attn_2(monkeypatch)
    backends.run_on_cuda(*inputs(16), as_bounds([0, 16]), "FLASH_ATTN")
    assert len(second.calls) == 1
    forget_backends()
    third = install_fa3_fwd(monkeypatch)
    backends.run_on_cuda(*inputs(16), as_bounds([0, 16]), "FLASH_ATTN")
    assert (len(second.calls), len(third.calls)) == (1, 1)
    forget_backends()
    fourth = install_flash_attn_4(monkeypatch)
    backends.run_on_cuda(*inputs(16), as_bounds([0, 16]), "FLASH_ATTN")
    assert (len(third.calls), len(fourth.calls)) == (1, 1)


@pytest.mark.parametrize("name", [*REFUSED_BACKENDS, "NO_SUCH", ""])
def test_unknown_names_are_refused_where_kernels_run(name: str, import_log: ImportLog) -> None:
    with pytest.raises(ConfigError, match="allowed: FLASH_ATTN") as caught:
        backends.run_on_cuda(*inputs(16), as_bounds([0, 16]), name)
    assert isinstance(caught.value, M3CompileError)
    assert import_log.asked == []
