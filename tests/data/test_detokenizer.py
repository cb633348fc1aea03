"""Ids to text: exact completions, and stop strings against a naive twin that decodes everything after each token."""

import random

import numpy as np
import pytest

from cbgen.data.detokenizer import Detokenizer, StopStringMatcher
from tests.helpers import BOS, EOS, ByteTokenizer, PieceTokenizer, byte_ids

_TEXTS = ["a", "b", " ", "é", "€", "😀", "x y", "\n"]
_PIECES = [b" ", b" a", b"a", b"b", b"ab ", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xaca", b"\xf0\x9f", b"\x98\x80"]
# No piece holds a whole character and then half of the next one; with those, see the test that names them.


def ids(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def completion(
    tokenizer: ByteTokenizer | PieceTokenizer, prompt: list[int], output: list[int], skip: bool = True
) -> str:
    return Detokenizer(tokenizer).text(ids(prompt), output, skip_special_tokens=skip)


# -- completions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100))
def test_prompt_and_completion_are_the_decode_of_all_ids(seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = ByteTokenizer()
    prompt = byte_ids("".join(rng.choices(_TEXTS, k=rng.randrange(1, 12))))
    output = byte_ids("".join(rng.choices(_TEXTS, k=rng.randrange(8))))[: rng.randrange(1, 20)]

    text = completion(tokenizer, prompt, output)

    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + output)


@pytest.mark.parametrize("seed", range(100))
def test_leading_space_survives_a_decoder_that_strips_it(seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = PieceTokenizer([b" a", b"b", b" ", b" cc", "é".encode()], strips=True)
    prompt = rng.choices(range(5), k=rng.randrange(1, 12))
    output = rng.choices(range(5), k=rng.randrange(8))

    text = completion(tokenizer, prompt, output)

    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + output)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_special_tokens_are_removed_or_kept_everywhere_alike(seed: int, skip: bool) -> None:
    rng = random.Random(seed)
    tokenizer = ByteTokenizer()
    prompt = rng.choices([BOS, EOS, *byte_ids("ab")], k=rng.randrange(1, 20))
    output = rng.choices([BOS, EOS, *byte_ids("ab")], k=rng.randrange(8))

    text = completion(tokenizer, prompt, output, skip)

    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    assert tokenizer.decode(prompt, skip_special_tokens=skip) + text == whole


def test_prompt_that_ends_in_many_special_tokens_keeps_the_leading_space() -> None:
    tokenizer = PieceTokenizer([b"", b"a", b" b"], strips=True)

    assert completion(tokenizer, [1] + [0] * 30, [2]) == " b"


def test_prompt_that_ends_in_a_replacement_character_of_its_own_is_no_trouble() -> None:
    assert completion(ByteTokenizer(), byte_ids("ab\ufffd"), byte_ids("c")) == "c"


def test_prompt_that_ends_in_half_a_character_gives_the_output_alone() -> None:
    euro = byte_ids("€")

    assert completion(ByteTokenizer(), byte_ids("a") + euro[:1], [*euro[1:], *byte_ids("b")])[-1] == "b"


def test_no_output_is_no_text() -> None:
    assert completion(ByteTokenizer(), byte_ids("a"), []) == ""


# -- stop strings -----------------------------------------------------------------------------------------------------


def matcher_for(
    tokenizer: ByteTokenizer | PieceTokenizer,
    prompt: list[int],
    *stops: str,
    min_tokens: int = 0,
    include_stop: bool = False,
) -> StopStringMatcher:
    return StopStringMatcher(
        Detokenizer(tokenizer),
        ids(prompt),
        stops,
        min_tokens=min_tokens,
        include_stop=include_stop,
        skip_special_tokens=True,
    )


def feed(matcher: StopStringMatcher, output: list[int]) -> tuple[int, int] | None:
    """(tokens until it stopped, end of the completion)."""
    for number, token_id in enumerate(output, 1):
        if matcher(token_id):
            assert matcher.end is not None
            return number, matcher.end
    assert matcher.end is None
    return None


def naive(
    tokenizer: ByteTokenizer | PieceTokenizer,
    prompt: list[int],
    output: list[int],
    stops: tuple[str, ...],
    min_tokens: int,
    include_stop: bool,
) -> tuple[int, int] | None:
    """Decodes the whole row after each token; looks for every occurrence that ends in what token min_tokens or a later
    one added. Among several, the one that begins first.
    """
    skipped = len(tokenizer.decode(prompt))
    texts = [tokenizer.decode(prompt + output[:n])[skipped:] for n in range(len(output) + 1)]
    free = len(texts[max(0, min(min_tokens, len(output) + 1) - 1)].rstrip("\ufffd"))  # characters before that token
    for n in range(max(1, min_tokens), len(output) + 1):
        found = [
            (start, stop)
            for stop in stops
            for start in range(len(texts[n]))
            if texts[n].startswith(stop, start) and start + len(stop) > free
        ]
        if found:
            start, stop = min(found)
            return n, start + (len(stop) if include_stop else 0)
    return None


def random_case(seed: int) -> tuple[tuple[str, ...], int, bool, random.Random]:
    rng = random.Random(seed)
    letters = ["a", "b", " ", "é", "€", "😀"][: rng.randrange(2, 7)]
    stops = tuple("".join(rng.choices(letters, k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4)))
    return stops, rng.choice([0, 0, 1, 2, 5, 20]), rng.random() < 0.5, rng


@pytest.mark.parametrize("seed", range(300))
def test_matcher_equals_the_naive_twin_over_single_bytes(seed: int) -> None:
    stops, min_tokens, include_stop, rng = random_case(seed)
    tokenizer = ByteTokenizer()
    prompt = byte_ids("".join(rng.choices(_TEXTS, k=rng.randrange(1, 6))))
    output = byte_ids("".join(rng.choices(["a", "b", " ", "é", "€", "😀"], k=40)))

    found = feed(matcher_for(tokenizer, prompt, *stops, min_tokens=min_tokens, include_stop=include_stop), output)

    assert found == naive(tokenizer, prompt, output, stops, min_tokens, include_stop)


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("seed", range(300))
def test_matcher_equals_the_naive_twin_over_pieces_and_torn_characters(seed: int, strips: bool) -> None:
    stops, min_tokens, include_stop, rng = random_case(seed)
    tokenizer = PieceTokenizer(_PIECES, strips=strips)
    prompt = [rng.randrange(1, 5) for _ in range(rng.randrange(1, 10))]
    output = rng.choices(range(len(_PIECES)), k=40)

    found = feed(matcher_for(tokenizer, prompt, *stops, min_tokens=min_tokens, include_stop=include_stop), output)

    assert found == naive(tokenizer, prompt, output, stops, min_tokens, include_stop)


def test_stop_string_before_half_a_character_in_one_token_is_seen_at_once() -> None:
    tokenizer = PieceTokenizer([b"a", b"END\xe2", b"\x82\xac"])

    assert feed(matcher_for(tokenizer, [0], "END"), [0, 1]) == (2, 1)


def test_stop_string_that_begins_tokens_ago_is_found() -> None:
    assert feed(matcher_for(ByteTokenizer(), byte_ids("p"), "STOP"), byte_ids("xxSTOPyy")) == (6, 2)


def test_stop_string_that_begins_in_the_prompt_is_not_found() -> None:
    assert feed(matcher_for(ByteTokenizer(), byte_ids("ST"), "STOP"), byte_ids("OP")) is None


def test_include_stop_keeps_the_stop_string() -> None:
    assert feed(matcher_for(ByteTokenizer(), byte_ids("p"), "STOP", include_stop=True), byte_ids("xSTOP")) == (5, 5)


def test_stop_string_that_begins_first_wins_when_one_token_completes_two() -> None:
    tokenizer = PieceTokenizer([b"p", b"xaby"])

    assert feed(matcher_for(tokenizer, [0], "b", "ab"), [1]) == (1, 1)


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, (1, 0)), (1, (1, 0)), (2, (3, 2)), (3, (3, 2)), (4, None)])
def test_stop_string_counts_from_min_tokens_on(min_tokens: int, expected: tuple[int, int] | None) -> None:
    matcher = matcher_for(ByteTokenizer(), byte_ids("p"), "a", min_tokens=min_tokens)

    assert feed(matcher, byte_ids("abab"[:3] + "bb")) == expected


def test_end_cuts_the_text_that_the_detokenizer_gives_for_the_row() -> None:
    tokenizer = PieceTokenizer([b" a", b"\xe2\x82", b"\xac", b" ", b"END"], strips=True)
    matcher, output = matcher_for(tokenizer, [0], "END"), [1, 2, 3, 0, 4]

    assert feed(matcher, output) is not None
    assert completion(tokenizer, [0], output)[: matcher.end] == "€  a"


def test_few_tokens_are_decoded_per_call_however_long_the_row() -> None:
    tokenizer = CountingTokenizer([b"a", b"b"])
    matcher = matcher_for(tokenizer, [0] * 1000, "bb")

    feed(matcher, [0, 1] * 500)

    assert tokenizer.longest <= 32


class CountingTokenizer(PieceTokenizer):
    """Remembers the longest list that it had to decode."""

    longest = 0

    def decode(self, token_ids: list[int], **kwargs: object) -> str:
        self.longest = max(self.longest, len(token_ids))
        return super().decode(token_ids, **kwargs)
