"""Checkpoint files to the tower's tensors: names, shapes, reading, and random checkpoints."""

from m3compile.weights.checkpoint import (
    Checkpoint,
    TensorSource,
    checkpoint_preprocess,
    open_checkpoint,
)
from m3compile.weights.load import load_module_state, load_tower_state
from m3compile.weights.naming import NAMINGS, checkpoint_name
from m3compile.weights.quantise import (
    attention_scales,
    fp8_linears,
    quantised_weights,
    whole_state,
)
from m3compile.weights.random_checkpoint import init_checkpoint
from m3compile.weights.table import tower_tensor_shapes, tower_tensors

__all__ = [
    "NAMINGS",
    "Checkpoint",
    "TensorSource",
    "attention_scales",
    "checkpoint_name",
    "checkpoint_preprocess",
    "fp8_linears",
    "init_checkpoint",
    "load_module_state",
    "load_tower_state",
    "open_checkpoint",
    "quantised_weights",
    "tower_tensor_shapes",
    "tower_tensors",
    "whole_state",
]
