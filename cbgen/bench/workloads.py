"""W1 to W6: rows whose lengths are drawn from a seed, so that every engine can be given the same work.

Enters: a name, a scale and a number of rows. Leaves: a `Workload`: for each row a text, the tokens it should have, and
the tokens to generate. Lengths are forced: a row ends after exactly so many tokens, whatever the model says. numpy
only; `tokenized` ids come from the model's own tokenizer, `random_ids` serve where a model has none.

    W1  chat: ragged prompts and answers      refill, ragged attention
    W2  few-shot: groups share a long prefix  prefix cache
    W3  long tail: a few rows very long       order, tail, admission
    W4  scores: one token each                prefill
    W5  100 to 1,024 tokens in and out        the trace that nano-vllm publishes
    W6  256 tokens out                        the shape of transformers' own figure
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Scale = Literal["small", "full"]
Lengths = npt.NDArray[np.int64]
Draw = Callable[[np.random.Generator, int], Lengths]

# Frequent words, each one token for most tokenizers: a text of n words has about n tokens.
_VOCABULARY = (
    "the of and to in is that for it as was with be by on not he this are or his from at which but have an had they "
    "you were their one all we can her has there been if more when will would who so no said what up its about than "
    "into them only other new some could time these two may then do first any my now such like our over man me even "
    "most made after also did many before must through back years where much your way well down should because each "
    "just those people how too little state good very make world still own see men work long here get both between "
    "life being under never day same another know while last might us great old year off come since against go came "
    "right used take three water house use without place home small found school part number light night point life"
)
_WORDS = _VOCABULARY.split()


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows to generate. N = number of rows.

    Attributes:
        texts: [N] prompts as text.
        prompt_lengths: [N] tokens that each text was made for; a tokenizer may make a few more or fewer of it.
        lengths: [N] tokens to generate, exactly.
        shares_prefixes: whether an engine's prefix cache has something to find.
    """

    name: str
    scale: Scale
    seed: int
    texts: list[str]
    prompt_lengths: Lengths
    lengths: Lengths
    shares_prefixes: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, slots=True)
class _Shape:
    """How the rows of one workload are drawn. `groups`: rows in each, and how long the prefix is that they share."""

    rows: int
    prompt: Draw
    output: Draw
    group_rows: int = 0
    prefix: tuple[int, int] = (0, 0)


def lognormal(median: float, sigma: float, least: int, most: int) -> Draw:
    """Whole numbers, log-normally distributed and clipped."""

    def draw(rng: np.random.Generator, count: int) -> Lengths:
        values = np.round(rng.lognormal(np.log(median), sigma, count))
        return np.clip(values, least, most).astype(np.int64)

    return draw


def uniform(least: int, most: int) -> Draw:
    """Whole numbers from `least` to `most`, both included."""

    def draw(rng: np.random.Generator, count: int) -> Lengths:
        return rng.integers(least, most + 1, count)

    return draw


def mixed(usual: Draw, rare: Draw, share: float) -> Draw:
    """`usual`, and for a fixed share of the rows (at random places, at least one) `rare`."""

    def draw(rng: np.random.Generator, count: int) -> Lengths:
        values = usual(rng, count)
        places = rng.permutation(count)[: max(1, round(count * share))]
        values[places] = rare(rng, len(places))
        return values

    return draw


_SHAPES: dict[tuple[str, Scale], _Shape] = {
    ("W1", "small"): _Shape(192, lognormal(40, 0.5, 8, 256), lognormal(75, 0.85, 16, 384)),
    ("W1", "full"): _Shape(4096, lognormal(120, 1.1, 1, 2048), lognormal(150, 1.0, 1, 1024)),
    ("W2", "small"): _Shape(96, uniform(60, 120), uniform(1, 64), 24, (600, 1200)),
    ("W2", "full"): _Shape(2000, uniform(60, 120), uniform(1, 64), 100, (600, 1200)),
    ("W3", "small"): _Shape(
        128, lognormal(40, 0.5, 8, 256), mixed(lognormal(50, 0.6, 4, 400), uniform(400, 900), 0.05)
    ),
    ("W3", "full"): _Shape(
        2048, lognormal(120, 1.1, 1, 2048), mixed(lognormal(100, 0.6, 1, 1000), uniform(1000, 4000), 0.05)
    ),
    ("W4", "small"): _Shape(64, uniform(64, 1024), uniform(1, 1)),
    ("W4", "full"): _Shape(4096, uniform(64, 1024), uniform(1, 1)),
    ("W5", "small"): _Shape(64, uniform(25, 256), uniform(25, 256)),
    ("W5", "full"): _Shape(256, uniform(100, 1024), uniform(100, 1024)),
    ("W6", "small"): _Shape(64, lognormal(85, 0.4, 30, 300), uniform(256, 256)),
    ("W6", "full"): _Shape(1319, lognormal(85, 0.4, 30, 300), uniform(256, 256)),
}
NAMES = tuple(sorted({name for name, _ in _SHAPES}))


def make_workload(name: str, *, scale: Scale = "small", rows: int | None = None, seed: int = 0) -> Workload:
    """Draw the rows of one workload: the same for the same arguments, wherever it runs.

    Args:
        name: one of `NAMES`.
        scale: `small` fits two cores, `full` a GPU.
        rows: how many; None is what the scale has.
        seed: of all draws.

    Raises:
        ValueError: no such workload, or no rows.
    """
    if (name, scale) not in _SHAPES:
        raise ValueError(f"there is no workload {name!r}; there are {', '.join(NAMES)}")
    shape = _SHAPES[name, scale]
    rows = shape.rows if rows is None else rows
    if rows < 1:
        raise ValueError(f"a workload needs at least one row, not {rows}")
    rng = np.random.default_rng([seed, int(name[1:]), scale == "full"])
    prompt_lengths, lengths = shape.prompt(rng, rows), shape.output(rng, rows)  # [N], [N]
    prefixes = _prefixes(shape, rng, rows)
    texts = [prefixes[row] + _words(rng, int(count)) for row, count in enumerate(prompt_lengths)]
    own = np.array([len(words) for words in texts], dtype=np.int64)
    return Workload(name, scale, seed, [" ".join(words) for words in texts], own, lengths, bool(shape.group_rows))


def random_ids(workload: Workload, vocab_size: int) -> list[list[int]]:
    """[N] token ids of exactly `prompt_lengths`, equal where the words are equal."""
    places = {word: number for number, word in enumerate(dict.fromkeys(_WORDS))}
    rng = np.random.default_rng([workload.seed, vocab_size])
    chosen = rng.integers(0, vocab_size, len(places))
    return [[int(chosen[places[word]]) for word in text.split()] for text in workload.texts]


def shareable_tokens(prompts: list[list[int]], block_size: int = 16) -> int:
    """Prompt tokens that a prefix cache of whole blocks could serve: blocks that an earlier row begins with, too.

    The last token of a prompt is always computed: its logits are needed.
    """
    seen: set[int] = set()
    count = 0
    for ids in prompts:
        digest = 0
        for start in range(0, len(ids) - len(ids) % block_size, block_size):
            digest = hash((digest, *ids[start : start + block_size]))
            if digest in seen and start + block_size < len(ids):
                count += block_size
            seen.add(digest)
    return count


def _prefixes(shape: _Shape, rng: np.random.Generator, rows: int) -> list[list[str]]:
    """[N] the words that each row shares with its group; rows of a group stand together."""
    if not shape.group_rows:
        return [[] for _ in range(rows)]
    groups = -(-rows // shape.group_rows)
    shared = [_words(rng, int(rng.integers(shape.prefix[0], shape.prefix[1] + 1))) for _ in range(groups)]
    return [shared[row // shape.group_rows] for row in range(rows)]


def _words(rng: np.random.Generator, count: int) -> list[str]:
    return [_WORDS[i] for i in rng.integers(0, len(_WORDS), count)]
