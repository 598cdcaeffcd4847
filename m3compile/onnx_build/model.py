"""The tower as an ONNX model: traced, translated, optimised and named."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from m3compile.errors import OperationError
from m3compile.onnx_build.translations import TRANSLATIONS
from m3compile.onnx_format import (
    EMBEDDINGS,
    PIXEL_VALUES,
    PRODUCER,
    SEGMENTS,
    OnnxMetadata,
    to_properties,
)
from m3compile.tower import Tower

# What the trace runs on; small, and no size in it is 0 or 1, which export would bake in.
_EXAMPLE_SEGMENTS = ((1, 2, 4), (1, 4, 4))
# Rows are counted in int32 inside the program.
_MAX_TOKENS = 2**29 - 1
_LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir")


class _OnnxTower(nn.Module):
    """The tower with the inputs and the output of the ONNX file."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, pixel_values: Tensor, segments: Tensor) -> Tensor:
        # The int32 of the compiled program: half the memory, and runtimes without int64 kernels.
        embeddings: Tensor = self.tower(pixel_values, segments.to(torch.int32))[0]
        return embeddings


def to_onnx_model(tower: Tower, metadata: OnnxMetadata) -> ir.Model:
    """Translate the tower, for any number of patches and of segments.

    Args:
        tower: with backend `TORCH_SDPA` and plain passes. Its weights are shared with the model,
            not copied.
        metadata: its `opset` is the model's.

    Raises:
        OperationError: the exporter cannot write that opset, or failed.
    """
    model = _translate(_trace(tower), metadata.opset)
    # A conversion that fails inside the exporter only leaves the model at another opset.
    if model.opset_imports != {"": metadata.opset}:
        raise OperationError(
            f"the exporter of torch {torch.__version__} wrote opset {model.opset_imports}, "
            f"expected {metadata.opset} of the standard domain alone; choose another --opset"
        )
    _describe(model, metadata)
    return model


def _trace(tower: Tower) -> ExportedProgram:
    config, weight = tower.config, tower.patch_embed.weight
    segments = torch.tensor(_EXAMPLE_SEGMENTS)
    num_patches = int(segments.prod(1).sum())
    pixel_values = torch.zeros(num_patches, config.patch_dim, dtype=weight.dtype)
    num_tokens = Dim("num_tokens", min=1, max=_MAX_TOKENS)
    return torch.export.export(
        _OnnxTower(tower),
        (pixel_values, segments),
        dynamic_shapes=(
            {0: config.patches_per_token * num_tokens},
            {0: Dim("num_segments", min=1)},
        ),
        strict=False,
    )


def _translate(exported: ExportedProgram, opset: int) -> ir.Model:
    with _quiet():
        try:
            program = torch.onnx.export(
                exported,
                (),
                dynamo=True,
                opset_version=opset,
                custom_translation_table=TRANSLATIONS,
                output_names=[EMBEDDINGS],
                optimize=True,
                verbose=False,
            )
        except (torch.onnx.OnnxExporterError, ir.passes.PassError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise OperationError(f"the ONNX exporter failed: {reason[0]}") from error
    assert program is not None
    return program.model


def _describe(model: ir.Model, metadata: OnnxMetadata) -> None:
    """Names of sizes, and metadata in place of the exporter's notes on the builder's source."""
    pixel_values, segments = model.graph.inputs
    (embeddings,) = model.graph.outputs
    assert [value.name for value in model.graph.inputs] == [PIXEL_VALUES, SEGMENTS]
    names = {}
    for value, name in (
        (pixel_values, "num_patches"),
        (embeddings, "num_tokens"),
        (segments, "num_segments"),
    ):
        assert value.shape is not None
        names[str(value.shape[0])] = name
    for value in _values(model):
        value.metadata_props.clear()
        if value.shape is not None:
            value.shape = ir.Shape(_renamed(size, names) for size in value.shape)
    # Absent, the condition of a loop is true; not every runtime knows that.
    always = ir.Value(name="always", const_value=ir.tensor(True, name="always"))
    model.graph.register_initializer(always)
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        if node.op_type == "Loop" and node.inputs[1] is None:
            node.replace_input_with(1, always)
    model.graph.metadata_props.clear()
    model.graph.name = PRODUCER
    model.metadata_props.clear()
    model.metadata_props.update(to_properties(metadata))
    model.producer_name, model.producer_version = PRODUCER, metadata.version
    model.doc_string = f"MiniMax-M3 vision encoder, from {metadata.source}"


def _renamed(size: int | ir.SymbolicDim, names: dict[str, str]) -> int | ir.SymbolicDim:
    # An unknown size must stay nameless: a runtime takes equal names for equal sizes.
    if isinstance(size, int) or size.value is None:
        return size
    pattern = "|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in names)
    return ir.SymbolicDim(re.sub(pattern, lambda match: names[match[0]], size.value))


def _values(model: ir.Model) -> Iterator[ir.Value]:
    yield from model.graph.inputs
    for node in model.graph.all_nodes():
        yield from node.outputs


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter from reporting on packages and conversions that don't concern the user."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
