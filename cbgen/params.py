"""Sampling parameters: the run's defaults, and what one row may override.

Values enter from the command line, from the model's generation_config.json and from rows (`sampling_params`, OpenAI
Batch bodies); `merge_params` checks them once, and everything downstream trusts a `SamplingParams`. Token ids among
them are checked against the model by `check_vocabulary`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

DEFAULT_MAX_TOKENS = 1024
LARGEST_N = 128  # as OpenAI's; a row is held back until its last sample has ended
_GREEDY_BELOW = 1e-30  # dividing logits by less overflows float32
_LARGEST = 2**63  # whole numbers are below it: they are stored and sent as 64 bits
_LARGEST_TEMPERATURE = 1e6  # uniform long before; float32 logits divided by more lose what tells them apart
_LARGEST_PENALTY = 1e3  # float32 logits times more overflow; the same bound holds for its inverse
_LARGEST_BIAS = 100.0
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one row is sampled and when it stops.

    Raises:
        ValueError: a value is out of range; the message names the parameter and the rule.
    """

    n: int = 1  # independent samples of the row
    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps the whole vocabulary
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # CTRL's penalty (arXiv 1909.05858) over prompt and output; 1 is off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit), by id; -100 forbids it
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        penalty, biases = self.repetition_penalty, [bias for _, bias in self.logit_bias]
        _require(1 <= self.n <= LARGEST_N, "n", f"from 1 to {LARGEST_N}", self.n)
        _require(1 <= self.max_tokens < _LARGEST, "max_tokens", "at least 1", self.max_tokens)
        _require(0 <= self.min_tokens < _LARGEST, "min_tokens", "0 or more", self.min_tokens)
        _require(
            0 <= self.temperature <= _LARGEST_TEMPERATURE, "temperature", "0 or more, at most 1e6", self.temperature
        )
        _require(0 <= self.top_k < _LARGEST, "top_k", "0 or -1 (off) or more", self.top_k)
        _require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p", "from 0 to 1", self.min_p)
        _require(
            1 / _LARGEST_PENALTY <= penalty <= _LARGEST_PENALTY, "repetition_penalty", "from 0.001 to 1000", penalty
        )
        _require(all(-_LARGEST_BIAS <= b <= _LARGEST_BIAS for b in biases), "logit_bias", "from -100 to 100", biases)
        _require(0 <= self.seed < _LARGEST, "seed", "from 0 to 2**63 - 1", self.seed)
        _require(all(self.stop), "stop", "non-empty strings", self.stop)
        _require(
            all(0 <= i < _LARGEST for i in self.stop_token_ids), "stop_token_ids", "0 or more", self.stop_token_ids
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready values, for the fingerprint and the summary."""
        return {**asdict(self), "logit_bias": {str(token_id): bias for token_id, bias in self.logit_bias}}


PARAM_NAMES = tuple(f.name for f in fields(SamplingParams))


def merge_params(base: SamplingParams, overrides: dict[str, Any]) -> SamplingParams:
    """`base` with `overrides` on top; null values mean "as the run has it".

    Raises:
        ValueError: an unknown name, a wrong type, or a value out of range.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    unknown = sorted(set(given) - set(PARAM_NAMES))
    if unknown:
        raise ValueError(f"unknown sampling parameter {shown(unknown[0])}; known are {', '.join(PARAM_NAMES)}")
    if not given:
        return base
    return replace(base, **{name: _coerce(name, value) for name, value in given.items()})


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Every token id that the parameters name must be one of the model's.

    Raises:
        ValueError: one is not; the message names the parameter and the id.
    """
    named = {"stop": params.stop_token_ids, "logit_bias": tuple(token_id for token_id, _ in params.logit_bias)}
    for name, token_ids in named.items():
        largest = max(token_ids, default=0)
        if largest >= vocab_size:
            raise ValueError(f"{name} token id {largest} is outside the vocabulary (0 to {vocab_size - 1})")


def shown(value: object) -> str:
    """A value for a message: as Python writes it, and cut short."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python converts
        text = "a number of thousands of digits"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _coerce(name: str, value: Any) -> Any:
    """One override in the type its field has; JSON writers spell the same value in several ways."""
    coerce: Callable[[str, Any], Any] = _COERCE.get(name, _number)
    return coerce(name, value)


def _number(name: str, value: Any) -> float:
    _check_number(name, value)
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name} is too large") from error


def _whole_number(name: str, value: Any) -> int:
    _check_number(name, value)
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{name} must be a whole number, not {shown(value)}")
    return 0 if (name, value) == ("top_k", -1) else int(value)


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, not {shown(value)}")


def _truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {shown(value)}")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(isinstance(item, str) for item in values):
        raise ValueError(f"{name} must be a string or a list of strings, not {shown(value)}")
    return tuple(values)


def _integers(name: str, value: Any) -> tuple[int, ...]:
    values = [value] if isinstance(value, int) else value
    if not isinstance(values, list | tuple) or not all(type(item) is int for item in values):
        raise ValueError(f"{name} must be a list of token ids, not {shown(value)}")
    return tuple(values)


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object of token ids and numbers, not {shown(value)}")
    given = {key: bias for key, bias in value.items() if bias is not None}  # Arrow gives every row all keys
    return tuple(sorted({_token_id(name, key): _number(name, bias) for key, bias in given.items()}.items()))


def _token_id(name: str, key: Any) -> int:
    """A key of an object is a string in JSON, and may be a number in YAML."""
    digits = str(key) if type(key) is int and 0 <= key < _LARGEST else key
    if not (isinstance(digits, str) and digits.isascii() and digits.isdigit() and len(digits) < len(str(_LARGEST))):
        raise ValueError(f"{name} must have token ids as keys, not {shown(key)}")
    return int(digits)


_COERCE: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("n", "max_tokens", "min_tokens", "top_k", "seed"), _whole_number),
    **dict.fromkeys(("ignore_eos", "include_stop", "skip_special_tokens"), _truth),
    "stop": _strings,
    "stop_token_ids": _integers,
    "logit_bias": _biases,
}


def _require(holds: bool, name: str, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{name} must be {rule}, not {shown(value)}")
