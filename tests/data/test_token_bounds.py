"""The fewest tokens of a text, against real tokenizers; no bound where characters can vanish."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from cbgen.data.token_bounds import TokenBound, find_token_bound


class Wrapped:
    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend


def byte_level(**options: object) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox " * 20, "\n\n\n\n    " * 50, "ééé 你好 " * 30], trainer)
    for name, value in options.items():
        setattr(tokenizer, name, value)
    return tokenizer


def without_controls() -> Tokenizer:
    """Like SmolLM's: no token for some control characters, and for bytes that hardly occur."""
    alphabet = [character for character in pre_tokenizers.ByteLevel.alphabet() if character not in "\u0100\u0104òñ"]
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(sorted(alphabet))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def byte_fallback() -> Tokenizer:
    vocabulary = {f"<0x{number:02X}>": number for number in range(256)} | {"▁": 256, "a": 257, "▁a": 258}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [byte_level(), byte_fallback(), byte_level(normalizer=normalizers.NFC()), without_controls()],
    ids=["bytes", "spm", "nfc", "without_controls"],
)
@pytest.mark.parametrize("seed", range(20))
def test_no_text_has_fewer_tokens_than_the_bound(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    pieces = [
        "the quick ",
        "\n",
        " ",
        "    ",
        "é",
        "e\u0301",
        "\u1100\u1161\u11a8",
        "你好",
        "\U0001f600",
        "\x00",
        "\x04",
        "\U00050000",
        "x",
    ]
    text = "".join(rng.choices(pieces, k=200))
    bound = find_token_bound(Wrapped(tokenizer))

    assert bound is not None
    assert bound.fewest_tokens(text) <= len(tokenizer.encode(text).ids)
    assert bound.fewest_tokens("x" * 100 * bound.longest) == 100


def test_tokens_that_swallow_blanks_take_the_bound_away() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<end>", rstrip=True, special=True)])
    bound = find_token_bound(Wrapped(tokenizer))

    assert bound is not None
    assert bound.fewest_tokens("<end>" + " " * 1000) == 0
    assert bound.fewest_tokens(" " * 1000) > 0


def test_characters_without_a_token_do_not_count() -> None:
    tokenizer = without_controls()
    bound = find_token_bound(Wrapped(tokenizer))

    assert bound == TokenBound(1, dropped="\x00\x04")
    assert bound.fewest_tokens("\x00\x04" * 100) == len(tokenizer.encode("\x00\x04" * 100).ids) == 0


def test_long_added_token_counts() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["x" * 500])

    assert find_token_bound(Wrapped(tokenizer)) == TokenBound(500)


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_level(normalizer=normalizers.Strip()),
        byte_level(normalizer=normalizers.Replace(" ", "")),
        byte_level(normalizer=normalizers.BertNormalizer()),
        byte_level(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        ),
        Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
        Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
        Tokenizer(models.BPE({"a": 0}, [])),
        Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)),
    ],
)
def test_tokenizer_that_can_lose_characters_has_no_bound(tokenizer: Tokenizer) -> None:
    assert find_token_bound(Wrapped(tokenizer)) is None


def test_tokenizer_without_a_description_has_no_bound() -> None:
    assert find_token_bound(object()) is None
