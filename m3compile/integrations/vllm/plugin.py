"""The entry point `vllm.general_plugins`: the swap, and nothing where no artifact is named."""

from __future__ import annotations

import os
from pathlib import Path

ARTIFACT_VARIABLE = "M3COMPILE_ARTIFACT"
ARCHITECTURE = "MiniMaxM3SparseForConditionalGeneration"
# Named, not imported: vLLM imports a model only where it builds one.
HOST = f"m3compile.integrations.vllm.model:{ARCHITECTURE}"


def register() -> None:
    """Register the host with the mixin in place of vLLM's, if M3COMPILE_ARTIFACT names an artifact.

    vLLM calls this in each of its processes, some of them more than once.

    Raises:
        ArtifactError: there is none at that path, or it is damaged or of another format.
        RequestError: this vLLM does not know the model.
    """
    folder = os.environ.get(ARTIFACT_VARIABLE)
    if not folder:
        return
    from vllm import ModelRegistry

    from m3compile.artifact import read_manifest
    from m3compile.errors import RequestError

    read_manifest(Path(folder))
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        raise RequestError(
            f"{ARTIFACT_VARIABLE} is set, but this vLLM does not know {ARCHITECTURE}; use vLLM "
            f"0.33.0, or unset {ARTIFACT_VARIABLE}"
        )
    ModelRegistry.register_model(ARCHITECTURE, HOST)
