"""A YAML file as a mapping, strictly: every fault is one line that names the file."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from m3compile.config.shown import shown
from m3compile.errors import ConfigError, InputNotFoundError

# PyYAML lets these out where a tag and its text do not fit, as in `!!int x` or `2026-13-01`.
_SCALAR_ERRORS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice; PyYAML itself keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {shown(key.value)} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml_mapping(path: Path) -> dict[Any, Any]:
    """The top level of a YAML file; an empty file is an empty mapping.

    Raises:
        ConfigError: the file cannot be read, is not YAML, gives a key twice or holds no mapping.
        InputNotFoundError: there is no such file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputNotFoundError(f"build config {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"build config {path} cannot be read: {error}") from None
    try:
        document = yaml.load(text, _StrictLoader)
    except RecursionError:
        raise ConfigError(f"build config {path} is nested too deeply") from None
    except (yaml.YAMLError, *_SCALAR_ERRORS) as error:
        detail = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"build config {path} is not valid YAML: {detail}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"build config {path} holds a {type(document).__name__}; expected keys with values"
        )
    return document
