"""Facts about the encoder and about a build. Imports neither torch nor anything above floor 0."""

from m3compile.config.bounds import BOUNDS, Bounds
from m3compile.config.build import (
    ATTENTION_NAMES,
    DTYPES,
    ENGINES,
    BuildConfig,
    build_config_from_mapping,
    load_build_config,
)
from m3compile.config.checkpoint_config import tower_config_from_checkpoint
from m3compile.config.preprocess import (
    PreprocessConfig,
    preprocess_config_for_tower,
    preprocess_config_from_mapping,
)
from m3compile.config.tower import TINY, TowerConfig

__all__ = [
    "ATTENTION_NAMES",
    "BOUNDS",
    "DTYPES",
    "ENGINES",
    "TINY",
    "Bounds",
    "BuildConfig",
    "PreprocessConfig",
    "TowerConfig",
    "build_config_from_mapping",
    "load_build_config",
    "preprocess_config_for_tower",
    "preprocess_config_from_mapping",
    "tower_config_from_checkpoint",
]
