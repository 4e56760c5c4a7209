"""Knobs in YAML files: read as the flags of the command line that say the same, and written as a run resolved them."""

import dataclasses
import typing
from pathlib import Path
from typing import Any

import yaml

from host.disk import code_version
from host.lookup import nearest


def yaml_flags(path: str, config: type) -> list[str]:
    """A YAML file of groups and knobs as the flags that say the same, so that one parser does all the typing. `config`
    is a dataclass of dataclasses: its fields are the groups, theirs the knobs."""
    groups: dict[str, Any] = typing.get_type_hints(config)
    types = {name: typing.get_type_hints(group) for name, group in groups.items()}
    knobs_of = {name: [knob.name for knob in dataclasses.fields(group)] for name, group in groups.items()}
    flags = []
    for group, knobs in read_yaml(path).items():
        if group not in knobs_of:
            near = nearest(str(group), knobs_of)
            raise ValueError(f"{path}: {group!r} is not a group of knobs{near}; groups: {', '.join(knobs_of)}")
        if knobs is None:  # all of the group's are commented out
            continue
        if not isinstance(knobs, dict):
            raise ValueError(f"{path}: {group} is a group of knobs, not {knobs!r}")
        for knob, value in knobs.items():
            if knob not in knobs_of[group]:
                raise ValueError(f"{path}: {group}.{knob} is not a knob{nearest(str(knob), knobs_of[group])}")
            flags += to_flag(f"{group}.{knob}", value, types[group][knob], path)
    return flags


def read_yaml(path: str) -> dict:
    """The tree in a YAML file. ValueError when there is none."""
    if not Path(path).is_file():
        raise ValueError(f"--config {path}: there is no such file")
    try:
        tree = yaml.safe_load(Path(path).read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"--config {path} must hold groups of knobs, not {tree!r}")
    return tree


def to_flag(name: str, value: Any, kind: Any, path: str) -> list[str]:
    """A knob and its value from YAML as words of the command line. ValueError when the value is of no such type."""
    wrong_list = isinstance(value, list) and typing.get_origin(kind) is not tuple
    wrong_none = value is None and type(None) not in typing.get_args(kind)
    wrong_bool = kind is bool and not isinstance(value, bool)
    if isinstance(value, dict) or wrong_list or wrong_none or wrong_bool:
        wanted = "true or false" if kind is bool else f"a value of type {kind}"
        raise ValueError(f"{path}: {name}={value!r} must be {wanted}")
    if kind is bool:
        group, knob = name.split(".")
        return [f"--{name}" if value else f"--{group}.no-{knob}"]
    values = value if isinstance(value, list) else [value]
    return [f"--{name}", *("None" if v is None else str(v) for v in values)]


def to_yaml(cfg) -> str:
    """The resolved configuration, readable by --config again, with the commit that ran it."""
    plain = {
        group: {knob: list(value) if isinstance(value, tuple) else value for knob, value in knobs.items()}
        for group, knobs in dataclasses.asdict(cfg).items()
    }
    return f"# {code_version()}\n" + yaml.safe_dump(plain, sort_keys=False)
