"""Compiling an exported program ahead of time, into a package without weights."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

from torch.export import ExportedProgram

from m3compile.errors import BuildError

_INDUCTOR_CONFIG = {
    # The weights live in weights.safetensors, once, and are bound by the loader.
    "aot_inductor.package_constants_in_so": False,
    # Without this, run-time input checks wrongly refuse the smallest size.
    "aot_inductor.check_lowerbound": False,
    # Compiling the headers ahead costs more than it saves for a single program.
    "aot_inductor.precompile_headers": False,
    # One kernel stacks the biases of all layers; by default it would be a copy for each.
    "max_pointwise_cat_inputs": 1024,
}

# Needed at load: the shared object, the custom-op calls and the metadata; CUDA kernels too.
_SOURCE_SUFFIXES = (".cc", ".cu", ".h", ".py")


def compile_package(exported: ExportedProgram, package: Path) -> None:
    """Compile with AOTInductor and write `package` (.pt2), without weights and sources.

    Raises:
        BuildError: no C++ compiler, one that makes packages crash, or the compiler failed.
    """
    # Imported here: it takes seconds, and only a build needs it.
    import torch._inductor
    from torch._inductor.exc import InductorError

    require_compiler()
    full = package.with_name(f"{package.stem}.full.pt2")
    try:
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(full), inductor_configs=_INDUCTOR_CONFIG
        )
        _slim(full, package)
    except (InductorError, RuntimeError, OSError) as error:
        raise BuildError(f"AOTInductor failed: {_reason(error)}") from error
    finally:
        full.unlink(missing_ok=True)
    _require_shared_libstdcxx(package)


def _reason(error: Exception) -> str:
    """What failed, and the C++ compiler's first complaint if it was the compiler."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    complaints = [line for line in lines[1:] if " error: " in line]
    return ": ".join([*lines[:1], *complaints[:1]]) or type(error).__name__


def require_compiler() -> None:
    """Refuse a machine without the C++ compiler that AOTInductor will call.

    Raises:
        BuildError: with the way out.
    """
    compiler = os.environ.get("CXX", "").strip() or "g++"
    if shutil.which(compiler.split()[0]) is None:
        raise BuildError(
            f"no C++ compiler: {compiler} is not on the PATH; install g++, or set CXX to a compiler"
        )


def _slim(source: Path, target: Path) -> None:
    """Copy a package without the sources, which nothing reads after the build."""
    with zipfile.ZipFile(source) as full, zipfile.ZipFile(target, "w") as slim:
        for info in full.infolist():
            if info.filename.endswith(".cpp"):
                # torch 2.11 finds the metadata by this file's name.
                slim.writestr(info, b"", zipfile.ZIP_STORED)
            elif not info.filename.endswith(_SOURCE_SUFFIXES):
                slim.writestr(info, full.read(info), zipfile.ZIP_STORED)


def _require_shared_libstdcxx(package: Path) -> None:
    """Refuse a program with libstdc++ linked in: two copies in one process crash at load."""
    with zipfile.ZipFile(package) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        for name in libraries:
            if b"libstdc++.so" not in archive.read(name) and b"libc++.so" not in archive.read(name):
                raise BuildError(
                    f"the C++ compiler {os.environ.get('CXX', 'g++')} links libstdc++ statically, "
                    "and the program would crash at load; set CXX and CC to the system's compiler, "
                    "such as CXX=/usr/bin/g++ CC=/usr/bin/gcc"
                )
    if not libraries:
        raise BuildError("AOTInductor wrote a package without a program")
