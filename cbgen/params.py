"""Sampling parameters: the run's defaults, and what one row may override.

Values enter from the command line, from the model's generation_config.json and from rows (`sampling_params`, OpenAI
Batch bodies); `merge_params` checks them once, and everything downstream trusts a `SamplingParams`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

DEFAULT_MAX_TOKENS = 1024
_GREEDY_BELOW = 1e-30  # dividing logits by less overflows float32
_LARGEST = 2**63  # whole numbers are below it: they are stored and sent as 64 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one row is sampled and when it stops.

    Raises:
        ValueError: a value is out of range; the message names the parameter and the rule.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps the whole vocabulary
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # CTRL's penalty (arXiv 1909.05858) over prompt and output; 1 is off
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _require(1 <= self.max_tokens < _LARGEST, "max_tokens", "at least 1", self.max_tokens)
        _require(0 <= self.min_tokens < _LARGEST, "min_tokens", "0 or more", self.min_tokens)
        _require(0 <= self.temperature < math.inf, "temperature", "0 or more", self.temperature)
        _require(0 <= self.top_k < _LARGEST, "top_k", "0 or -1 (off) or more", self.top_k)
        _require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p", "from 0 to 1", self.min_p)
        _require(0 < self.repetition_penalty < math.inf, "repetition_penalty", "above 0", self.repetition_penalty)
        _require(0 <= self.seed < 2**63, "seed", "from 0 to 2**63 - 1", self.seed)
        _require(all(self.stop), "stop", "non-empty strings", self.stop)
        _require(all(i >= 0 for i in self.stop_token_ids), "stop_token_ids", "0 or more", self.stop_token_ids)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready values, for the fingerprint and the summary."""
        return asdict(self)


PARAM_NAMES = tuple(f.name for f in fields(SamplingParams))


def merge_params(base: SamplingParams, overrides: dict[str, Any]) -> SamplingParams:
    """`base` with `overrides` on top; null values mean "as the run has it".

    Raises:
        ValueError: an unknown name, a wrong type, or a value out of range.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    unknown = sorted(set(given) - set(PARAM_NAMES))
    if unknown:
        raise ValueError(f"unknown sampling parameter {unknown[0]!r}; known are {', '.join(PARAM_NAMES)}")
    if not given:
        return base
    return replace(base, **{name: _coerce(name, value) for name, value in given.items()})


def _coerce(name: str, value: Any) -> Any:
    """One override in the type its field has; JSON writers spell the same value in several ways."""
    if name == "stop":
        return _strings(value)
    if name == "stop_token_ids":
        return _integers(value)
    if name in ("ignore_eos", "include_stop", "skip_special_tokens"):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, not {value!r}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, not {value!r}")
    if name in ("max_tokens", "min_tokens", "top_k", "seed"):
        if isinstance(value, float) and not value.is_integer():
            raise ValueError(f"{name} must be a whole number, not {value!r}")
        return 0 if (name, value) == ("top_k", -1) else int(value)
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name} is too large") from error


def _strings(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(isinstance(item, str) for item in values):
        raise ValueError(f"stop must be a string or a list of strings, not {value!r}")
    return tuple(values)


def _integers(value: Any) -> tuple[int, ...]:
    values = [value] if isinstance(value, int) else value
    if not isinstance(values, list | tuple) or not all(type(item) is int for item in values):
        raise ValueError(f"stop_token_ids must be a list of token ids, not {value!r}")
    return tuple(values)


def _require(holds: bool, name: str, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{name} must be {rule}, not {value!r}")
