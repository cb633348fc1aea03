"""The engines that can be compared: which script drives each, in which interpreter, and which settings are tried.

Enters: what a person types, such as `vllm` or `cbgen:disable=fusion+packing`. Leaves: an `Engine` with its grid of
knobs; each peer is timed at the best point of its grid, this engine at its defaults.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cbgen.config import OPTIMIZATIONS, OPTIMIZED_DEVICES

PEERS_DIRECTORY = Path(__file__).parent / "peers"
Knobs = dict[str, Any]
_OWN = ("cbgen", "cbgen-static", "cbgen-run")
_SHORT_NAMES = {"disable": "disabled", "slots": "max_num_seqs"}


@dataclass(frozen=True, slots=True)
class Engine:
    """One line of the table.

    Attributes:
        name: as it is typed and printed.
        kind: the engine without settings, such as `vllm`.
        script: in `PEERS_DIRECTORY`.
        fixed: knobs of every run.
        grid: what is tried, one dictionary for each point.
        grid_share: rows that the first pass over the grid takes, of all; slow engines get fewer.
        prefix_knob: knob that switches its prefix cache on, where the workload has something to share.
        kv_knob: knob for GiB of KV cache, of an engine that has to be told.
    """

    name: str
    kind: str
    script: Path
    fixed: Knobs
    grid: tuple[Knobs, ...] = ({},)
    grid_share: float = 1.0
    prefix_knob: str | None = None
    kv_knob: str | None = None

    @property
    def is_own(self) -> bool:
        return self.kind in _OWN


def _points(**choices: tuple[Any, ...]) -> tuple[Knobs, ...]:
    return tuple(dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))


def _engine(kind: str, script: str, grid: tuple[Knobs, ...] = ({},), **more: Any) -> Engine:
    return Engine(kind, kind, PEERS_DIRECTORY / f"{script}.py", more.pop("fixed", {}), grid, **more)


ENGINES = {
    engine.kind: engine
    for engine in (
        _engine("cbgen", "run_cbgen"),
        _engine("cbgen-static", "run_cbgen", fixed={"batching": "static"}),
        _engine("cbgen-run", "run_cbgen_pipeline"),
        _engine(
            "vllm",
            "run_vllm",
            _points(max_num_seqs=(64, 128, 192)),
            prefix_knob="prefix_caching",
            kv_knob="kv_gib",
        ),
        _engine("openvino", "run_openvino", _points(max_num_seqs=(32, 64, 128)), prefix_knob="prefix_caching"),
        _engine(
            "hf-cb",
            "run_hf_cb",
            _points(max_requests=(16, 64), max_batch_tokens=(256, 1024)),
            grid_share=0.25,
            prefix_knob="prefix_caching",
        ),
        _engine("hf-generate", "run_hf_generate", _points(batch_size=(8, 16, 32, 64)), grid_share=0.25),
    )
}
"""By name. The grids are what the README's table says."""


def parse_engine(text: str) -> Engine:
    """`NAME` or `NAME:KEY=VALUE,KEY=VALUE`; a key that the grid varies stays at the value given.

    Raises:
        ValueError: no such engine, or settings that cannot be read.
    """
    kind, _, settings = text.strip().partition(":")
    if kind not in ENGINES:
        raise ValueError(f"--engines: there is no engine {kind!r}; there are {', '.join(ENGINES)}")
    engine = ENGINES[kind]
    knobs: Knobs = {}
    for setting in filter(None, settings.split(",")):
        key, equals, value = setting.partition("=")
        key = _SHORT_NAMES.get(key.strip().replace("-", "_"), key.strip().replace("-", "_"))
        if not key or not equals or not value:
            raise ValueError(f"--engines {text}: write settings as KEY=VALUE, such as {kind}:max_num_seqs=64")
        knobs[key] = _value(text, key, value)
    grid = tuple({key: value for key, value in point.items() if key not in knobs} for point in engine.grid)
    distinct = {json.dumps(point, sort_keys=True): point for point in grid}
    return replace(engine, name=text.strip(), fixed={**engine.fixed, **knobs}, grid=tuple(distinct.values()))


def parse_engines(text: str) -> list[Engine]:
    """Names apart by commas; settings may hold commas, too: a part without a name goes on with the engine before.

    Raises:
        ValueError: as `parse_engine`; an engine that is named twice; none at all.
    """
    names: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if names and "=" in part and ":" not in part:
            names[-1] += f",{part}"
        else:
            names.append(part)
    engines = [parse_engine(name) for name in names]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"--engines names {twice} twice")
    if not engines:
        raise ValueError(f"--engines names no engine; there are {', '.join(ENGINES)}")
    return engines


def ablations(device: str) -> list[Engine]:
    """This engine with each optimization switched off in turn, then with all of them.

    Args:
        device: as the user named it; `auto` may be any kind.
    """
    kind = device.partition(":")[0]
    names = [name for name in OPTIMIZATIONS if kind in ("auto", OPTIMIZED_DEVICES.get(name, kind))]
    return [parse_engine(f"cbgen:disable={name}") for name in [*names, "+".join(names)]]


def _value(text: str, key: str, value: str) -> Any:
    """A number where it is one; a list of names for what is switched off."""
    if key == "disabled":
        names = value.split("+")
        unknown = next((name for name in names if name not in OPTIMIZATIONS), None)
        if unknown is not None:
            raise ValueError(f"--engines {text}: no optimization {unknown!r}; there are {', '.join(OPTIMIZATIONS)}")
        return names
    if value in ("true", "false"):
        return value == "true"
    return int(value) if value.isdecimal() else value


def describe_knobs(knobs: Knobs) -> str:
    """`max_num_seqs 128, kv_gib 2`."""
    shown = {key: "+".join(value) if isinstance(value, list) else value for key, value in knobs.items()}
    return ", ".join(f"{key} {value}" for key, value in shown.items())
