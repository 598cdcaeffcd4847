"""What the engine `reduce-overhead` needs in an artifact: the exported program, and caches."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from torch.export import ExportedProgram

from m3compile.errors import BuildError

_FRESH = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from m3compile.reduce_overhead import ReducedProgram
exported, weights, device, folder = sys.argv[1:]
where = torch.device(device, 0) if device == "cuda" else torch.device(device)
ReducedProgram(Path(exported), None, load_file(weights, str(where)), where, Path(folder))
"""
# Made anew by whoever needs them.
_NOT_CACHED = ("locks",)


def save_exported(exported: ExportedProgram, path: Path) -> None:
    """Write an exported program without its weights, which weights.safetensors holds once.

    `exported` keeps the weights' sizes only.
    """
    state = exported.state_dict
    for name, tensor in list(state.items()):
        state[name] = torch.nn.Parameter(tensor.to("meta"), requires_grad=False)
    torch.export.save(exported, path)


def fill_cache(exported: Path, weights: Path, device: str, path: Path) -> None:
    """Compile an exported program, and keep what the compiler leaves in its caches as a zip.

    In a fresh process, as a server's will be: what was compiled earlier in this one would change
    the keys of the caches.

    Args:
        exported: from `save_exported`.
        weights: the safetensors file.
        device: `cpu` or `cuda`.
        path: the zip to write.

    Raises:
        BuildError: the compiler failed; with the last line it said.
    """
    with tempfile.TemporaryDirectory(prefix="m3compile-") as folder:
        words = [str(exported), str(weights), device, folder]
        package = str(Path(__file__).resolve().parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            [sys.executable, "-c", _FRESH, *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise BuildError(f"torch.compile failed: {said[-1]}")
        _pack(Path(folder), path)


def _pack(folder: Path, path: Path) -> None:
    """Write the files of a compiler's cache folder into a zip."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            name = file.relative_to(folder)
            if file.is_file() and name.parts[0] not in _NOT_CACHED:
                archive.write(file, name.as_posix())
