"""Checks that need more than a look at single records: oracles, second runs, seeds.

Each takes a `Checked` and yields what is wrong. They run after a case passed everything else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.field_cases.cases import Case
from tests.field_cases.records import Answer

_NO_PROBABILITIES = ("bytes", "text_offset", "token_ids", "id", "token_id", "rank", "index")


@dataclass(frozen=True, slots=True)
class Checked:
    """What a case wrote.

    Attributes:
        raw: the bytes of the output.
        run_again: another run of the case, with another input or other parameters; returns its answers.
    """

    case: Case
    answers: list[Answer]
    raw: bytes
    run_again: Callable[..., list[Answer]]


Check = Callable[[Checked], Iterator[str]]


def no_bare_constants(checked: Checked) -> Iterator[str]:
    if b"NaN" in checked.raw or b"Infinity" in checked.raw:
        yield "NaN or Infinity in the output"


def same_keys(checked: Checked) -> Iterator[str]:
    if len({tuple(answer.raw) for answer in checked.answers}) != 1:
        yield "records have different keys"


def all_shards_once(checked: Checked) -> Iterator[str]:
    numbers = [answer.raw.get("k") for answer in checked.answers]
    if sorted(number for number in numbers if number is not None) != list(range(12)):
        yield f"values of k: {numbers}"
        return
    for answer, number in zip(checked.answers, numbers, strict=True):
        if answer.text != (" one END|two three" if number % 2 else " alpha beta gamma"):
            yield f"shard {number}: {answer.text!r}"
    if [answer.raw.get("k") for answer in checked.run_again()] != numbers:
        yield "the order differs between two runs"


def top_k(checked: Checked) -> Iterator[str]:
    for number in (0, 1, 3):
        if not _both_sides(checked.answers[number]):
            yield f"top_k record {number} has no diversity"
    if _both_sides(checked.answers[2]):
        yield "top_k 1 gave both sides"


def _both_sides(answer: Answer) -> bool:
    text = answer.text or ""
    return " h" in text and " t" in text


def seed_beside_neighbours(checked: Checked) -> Iterator[str]:
    seeded = [answer.text for answer in checked.run_again("many.jsonl") if answer.custom_id == "s"]
    if seeded != [checked.answers[0].text] * 3:
        yield f"the seeded row changed with its neighbours: {checked.answers[0].text!r} / {seeded!r}"


def samples(checked: Checked) -> Iterator[str]:
    answer = checked.answers[0]
    if not answer.ok:
        return
    texts = answer.texts or []
    if len(texts) != 4:
        yield f"{len(texts)} samples"
    if len(set(texts)) < 3:
        yield "samples are copies"
    if checked.run_again()[0].texts != texts:
        yield "the second run differs"


def log_probabilities(checked: Checked) -> Iterator[str]:
    yield from no_bare_constants(checked)
    for number, answer in enumerate(checked.answers):
        if not answer.ok:
            continue
        choices = answer.raw.get("choices") or [{}]
        values = list(_numbers(answer.raw.get("logprobs") or choices[0].get("logprobs")))
        if not values:
            yield f"record {number}: no logprobs"
        elif max(values) > 1e-6:
            yield f"record {number}: positive logprob {max(values)}"
        elif number == 0 and not any(abs(value + 0.6931) < 1e-3 for value in values):
            yield "no value near ln 0.5"


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in _NO_PROBABILITIES:
                yield from _numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _against_oracle(case: Case, answers: list[Answer], prefix: str = "") -> Iterator[str]:
    rows = json.loads((case.directory / "oracle.json").read_text())["rows"]
    for answer in answers:
        expected = rows[str(answer.custom_id).split(".")[0]]
        token_ids, safe = answer.raw.get("token_ids"), expected["safe_tokens"]
        if not answer.ok:
            yield f"{prefix}{answer.custom_id}: {answer.message}"
        elif token_ids is not None and token_ids[:safe] != expected["token_ids"][:safe]:
            yield f"{prefix}{answer.custom_id}: token ids differ from the oracle"
        elif not (answer.text or "").startswith(expected["safe_text"]):
            wanted = expected["safe_text"]
            yield f"{prefix}{answer.custom_id}: expected text to begin with {wanted!r}, got {answer.text!r}"


def any_batch_size(checked: Checked) -> Iterator[str]:
    yield from _against_oracle(checked.case, checked.answers)
    for size in (1, 3, 16):
        yield from _against_oracle(checked.case, checked.run_again(batch=size), f"batch {size}: ")


def four_times_the_rows(checked: Checked) -> Iterator[str]:
    yield from any_batch_size(checked)
    answers = checked.run_again("x4.jsonl")
    yield from _against_oracle(checked.case, answers, "x4: ")
    if len(answers) != 64:
        yield f"x4: {len(answers)} records"


def gguf_equals_original(checked: Checked) -> Iterator[str]:
    if checked.answers != checked.run_again():
        yield "the GGUF file answers differently from the model that it was made of"


CHECKS: dict[str, Check] = {
    "A-13": no_bare_constants,
    "B-09": same_keys,
    "D-10": no_bare_constants,
    "E-03": all_shards_once,
    "K-03": top_k,
    "K-05": seed_beside_neighbours,
    "K-07": samples,
    "K-10": log_probabilities,
    "L-01": any_batch_size,
    "L-02": four_times_the_rows,
    "L-03": any_batch_size,
}
"""Of cases without steps, by id."""

STEP_CHECKS: dict[str, Check] = {"O-07": gguf_equals_original}
"""Of cases with steps, once their steps left an output."""
