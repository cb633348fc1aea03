"""The ways in which the engine can run the same rows, by name."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from cbgen.config import EngineConfig
from cbgen.engine.engine import Engine
from cbgen.engine.loader import LoadedModel
from cbgen.engine.rounds import RoundRunner
from cbgen.params import SamplingParams
from tests.gpu_check.clock import synchronize


@dataclass(frozen=True, slots=True)
class Mode:
    """One way: how many decode steps are launched before the host looks, and which optimizations are off.

    `decode_steps` is None where the engine is to choose it.
    """

    name: str
    decode_steps: int | None
    disabled: frozenset[str] = frozenset()

    @property
    def has_graphs(self) -> bool:
        return self.decode_steps != 0 and "graphs" not in self.disabled


EAGER = Mode("eager", 0, frozenset({"graphs"}))
ROUNDS = Mode("eager rounds, K=4", 4, frozenset({"graphs"}))
GRAPHS_1 = Mode("graphs, K=1", 1)
GRAPHS_4 = Mode("graphs, K=4", 4)
GRAPHS_8 = Mode("graphs, K=8", 8)
CHOSEN = Mode("as the engine chooses", None)
UNMIXED = Mode("graphs, K=4, not mixed", 4, frozenset({"mixed"}))


@dataclass(frozen=True, slots=True)
class Watched:
    """An engine in one mode, and what went wrong when it launched rounds: it goes on with plain steps then, and its
    answers would not tell.
    """

    engine: Engine
    launch_errors: list[str]

    def forbid_sync(self, *, forbids: bool) -> None:
        """Whether a launch that waits for the device fails; without effect where there are no graphs, or no GPU."""
        rounds = self.engine.rounds
        if rounds is not None and rounds.graphs is not None:
            rounds.forbids_sync = forbids

    def describe(self) -> dict[str, Any]:
        """About graphs and launches."""
        rounds = self.engine.rounds
        graphs = None if rounds is None else rounds.graphs
        return {
            "num_graphs": 0 if graphs is None else len(graphs),
            "graphs_off": self.engine.stats.graphs_off,
            "launch_errors": sorted(set(self.launch_errors))[:3],
        }


def open_engine(loaded: LoadedModel, mode: Mode, **limits: Any) -> Watched:
    """A new engine. Where there is no GPU, steps are recorded as the functions that they are."""
    capture = (lambda run: run) if mode.has_graphs and loaded.device.type == "cpu" else None
    config = EngineConfig(decode_steps=mode.decode_steps, disabled=mode.disabled, **limits)
    engine, errors = Engine(loaded, config, capture=capture), []
    if engine.rounds is not None:
        launch, own = RoundRunner.launch, weakref.ref(engine.rounds)  # no cycle: graphs go when the engine does

        def watched(*arguments: Any) -> Any:
            try:
                return launch(own(), *arguments)  # type: ignore[arg-type]
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}"[:300])
                raise

        engine.rounds.launch = watched  # type: ignore[assignment,method-assign]
    return Watched(engine, errors)


@dataclass(frozen=True, slots=True)
class Answers:
    """What an engine made of rows.

    Attributes:
        token_ids: of each row; empty where it had not ended in time.
        seconds: of wall time, from the first row in to the last token out.
        is_complete: whether all rows ended.
    """

    token_ids: list[list[int]]
    seconds: float
    is_complete: bool


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    params: SamplingParams | None = None,
    seconds: float = float("inf"),
) -> Answers:
    """Feed rows as the pipeline does and collect their tokens. A row's random stream is its number.

    Args:
        engine: it may hold rows that were begun before; their answers are left out.
        prompts: [N] token ids.
        lengths: [N] tokens of each answer, where no stop id comes before.
        params: of all rows, but for `max_tokens`; greedy when None.
        seconds: give up after so long.

    Raises:
        RuntimeError: a row was refused, or failed.
    """
    answers: dict[int, list[int]] = {}
    following, ends, started = 0, time.perf_counter() + seconds, time.perf_counter()
    while following < len(prompts) or engine.has_unfinished:
        while following < len(prompts) and engine.wants_more:
            _add(engine, following, prompts[following], int(lengths[following]), params)
            following += 1
        engine.more_is_coming = following < len(prompts)
        for generation in engine.step():
            if generation.finish_reason not in ("length", "stop"):
                raise RuntimeError(f"row {generation.index}: {generation.finish_reason} {generation.detail}")
            answers[generation.index] = generation.token_ids
        if time.perf_counter() > ends:
            break
    synchronize(torch.device(engine.describe()["device"]))
    is_complete = not engine.has_unfinished and following == len(prompts)
    token_ids = [answers.get(row, []) for row in range(len(prompts))]
    return Answers(token_ids, time.perf_counter() - started, is_complete)


def _add(engine: Engine, row: int, prompt: Sequence[int], length: int, params: SamplingParams | None) -> None:
    own = replace(params or SamplingParams(), max_tokens=length, ignore_eos=True)
    refused = engine.add(row, np.array(prompt, dtype=np.int32), own, random_stream=(7, row, 0))
    if refused is not None:
        raise RuntimeError(f"row {row} was refused: {refused.finish_reason}")
