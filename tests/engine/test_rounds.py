"""Rounds: tokens, and everything a row is told of, are those of the plain path, whatever is in flight and however steps
are padded. A function that is run again stands in for a graph.
"""

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from cbgen.config import EngineConfig
from cbgen.engine.cuda_graph import CaptureError, StepShape
from cbgen.engine.engine import Engine
from cbgen.engine.kv_cache import bytes_per_block
from cbgen.engine.operators.reference import ReferenceOperators
from cbgen.engine.preparation import prepare
from cbgen.errors import CbgenError
from cbgen.params import SamplingParams
from tests.engine.parity import load
from tests.models import VOCAB_SIZE, build_model

SMALL_POOL_BLOCKS = 8


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return prepare(load(build_model("llama-ratio-3", tmp_path_factory.mktemp("m"))), set(), print)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return prepare(load(build_model("llama-ratio-3", tmp_path_factory.mktemp("p"))), {"native"}, print)


class Recorder:
    """Keeps a step to run it again, as a graph would be; counts what it recorded."""

    def __init__(self):
        self.num_recorded = 0

    def __call__(self, run):
        run()
        self.num_recorded += 1
        return run


def make_rows(seed, num_rows):
    """(prompt, parameters, text stop) of rows of every kind that a device can sample by itself, and some others."""
    rng = np.random.default_rng(seed)
    rows = []
    shared = rng.integers(3, VOCAB_SIZE, 40)
    for _ in range(num_rows):
        prompt = rng.integers(3, VOCAB_SIZE, rng.integers(1, 40))
        if rng.random() < 0.3:
            prompt = np.concatenate([shared[: rng.integers(16, 41)], prompt])
        max_tokens = int(rng.integers(1, 25))
        params = {"max_tokens": max_tokens, "ignore_eos": bool(rng.random() < 0.3)}
        if rng.random() < 0.5:
            params |= {"temperature": float(rng.uniform(0.2, 3)), "top_k": int(rng.choice([0, 1, 5, 40]))}
            params |= {"top_p": float(rng.choice([1, 0.9, 0.3])), "min_p": float(rng.choice([0, 0.1]))}
        if rng.random() < 0.3:
            params |= {"stop_token_ids": tuple(rng.integers(3, VOCAB_SIZE, rng.choice([3, 30])).tolist())}
        if rng.random() < 0.3:
            params |= {"min_tokens": int(rng.integers(0, max_tokens + 1))}
        if rng.random() < 0.05:
            params |= {"repetition_penalty": 1.2}
        rows.append((prompt.astype(np.int32), SamplingParams(**params), rng.random() < 0.2))
    return rows


def run(engine, rows, check=True):
    """Generations by (row, sample), the rows fed as the pipeline does."""
    waiting = iter([(index, sample, row) for index, row in enumerate(rows) for sample in range(row[1].n)])
    following, answers = next(waiting, None), {}
    while following is not None or engine.has_unfinished:
        while following is not None and engine.num_waiting < 2 * engine.limits.max_num_seqs:
            index, sample, (prompt, params, has_text_stop) = following
            count = itertools.count(1)
            stop = (lambda token_id, count=count: next(count) >= 3 and token_id % 5 == 0) if has_text_stop else None
            engine.add(index, prompt, params, random_stream=(7, index, sample), stop_on_text=stop)
            following = next(waiting, None)
        engine.more_is_coming = following is not None
        for generation in engine.step():
            key = generation.index, generation.sample
            assert key not in answers
            answers[key] = generation
        if check:
            engine.check_integrity()
    return answers


def tokens(answers):
    return {key: (a.token_ids, a.finish_reason) for key, a in answers.items()}


def without(*names):
    return frozenset(names)


CONFIGS = {
    "one step": {"decode_steps": 1},
    "one ahead": {"decode_steps": 2},
    "four a round": {"decode_steps": 8},
    "many": {"decode_steps": 32},
    "apart": {"decode_steps": 4, "disabled": without("mixed")},
    "static": {"decode_steps": 4, "batching": "static"},
    "small budget": {"decode_steps": 4, "max_num_batched_tokens": 7, "max_num_seqs": 5},
    "one slot": {"decode_steps": 4, "max_num_seqs": 1},
    "longest": {"decode_steps": 4, "order": "longest"},
    "no prefix cache": {"decode_steps": 4, "disabled": without("prefix-cache", "prediction")},
    "small pool": {"decode_steps": 4, "disabled": without("prediction"), "max_model_len": 112},
}


@pytest.mark.parametrize("is_recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_answer_as_on_the_plain_path(loaded, name, is_recorded):
    config = {"max_num_seqs": 11, "max_num_batched_tokens": 64, **CONFIGS[name]}
    if name == "small pool":
        config["kv_cache_memory"] = SMALL_POOL_BLOCKS * bytes_per_block(loaded.layers, 16, loaded.dtype)
    num_preempted = num_rounds = num_recorded = 0
    for seed in range(4):
        rows = make_rows(seed, 24)
        expected = run(Engine(loaded, EngineConfig(max_num_seqs=4)), rows)
        recorder = Recorder() if is_recorded else None
        engine = Engine(loaded, EngineConfig(**config), capture=recorder)
        answers = run(engine, rows)
        assert tokens(answers) == tokens(expected), seed
        assert engine.stats.num_sampled_tokens == sum(len(a.token_ids) for a in answers.values())
        num_preempted += engine.stats.num_preemptions
        num_rounds += engine.rounds._num_rounds
        num_recorded += recorder.num_recorded if recorder else 0
    assert num_rounds > 30
    assert (num_recorded >= 4) == is_recorded  # one at least in each run
    assert (num_preempted > 0) == (name == "small pool")


def test_steps_with_prompts_are_recorded_and_padded_too(loaded, monkeypatch):
    monkeypatch.setattr("cbgen.engine.cuda_graph._WANTED_TO_RECORD", 2)
    for seed in range(3):
        rows = make_rows(10 + seed, 60)
        recorder = Recorder()
        engine = Engine(
            loaded, EngineConfig(max_num_seqs=13, decode_steps=2, max_num_batched_tokens=64), capture=recorder
        )
        answers = run(engine, rows)
        assert tokens(answers) == tokens(run(Engine(loaded, EngineConfig(max_num_seqs=4)), rows))
        shapes = list(engine.rounds.graphs._graphs)
        assert any(shape.num_prefills for shape in shapes)
        assert len(shapes) == recorder.num_recorded


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_a_slot_is_sent_once_for_each_row_in_it(loaded, decode_steps):
    rows = [(p, SamplingParams(max_tokens=9), False) for p, _, _ in make_rows(5, 30)]
    engine = Engine(loaded, EngineConfig(max_num_seqs=7, decode_steps=decode_steps))
    send_new, sent = engine.rounds._send_new, []
    engine.rounds._send_new = lambda table, slots: sent.extend(slots) or send_new(table, slots)
    run(engine, rows)
    assert len(sent) == len(rows)


def test_rows_of_several_samples_and_none_of_them_twice(loaded):
    rows = [(prompt, SamplingParams(n=3, temperature=1.0, max_tokens=9), False) for prompt, _, _ in make_rows(5, 8)]
    expected = tokens(run(Engine(loaded, EngineConfig(max_num_seqs=4)), rows))
    assert tokens(run(Engine(loaded, EngineConfig(max_num_seqs=7, decode_steps=6)), rows)) == expected
    assert len(expected) == 24


@pytest.mark.parametrize("decode_steps", [1, 2, 3, 4, 8])
def test_a_row_that_stops_costs_fewer_slot_steps_than_decode_steps(loaded, decode_steps):
    rows = [
        (p, SamplingParams(max_tokens=40, stop_token_ids=tuple(range(3, VOCAB_SIZE, 9))), False)
        for p, _, _ in make_rows(3, 40)
    ]
    engine = Engine(loaded, EngineConfig(max_num_seqs=8, decode_steps=decode_steps))
    answers = run(engine, rows)
    num_stopped = sum(a.finish_reason == "stop" for a in answers.values())
    assert num_stopped > 20
    assert engine.stats.num_discarded_tokens <= len(rows) * (decode_steps - 1)
    assert (engine.stats.num_discarded_tokens > 0) == (decode_steps > 1)


def test_rows_whose_length_is_known_cost_nothing_with_rounds_of_one_step(loaded):
    rows = [
        (p, SamplingParams(max_tokens=5 + i % 7, ignore_eos=True), False)
        for i, (p, _, _) in enumerate(make_rows(4, 40))
    ]
    engine = Engine(loaded, EngineConfig(max_num_seqs=8, decode_steps=2, max_num_batched_tokens=512))
    answers = run(engine, rows)
    assert all(a.finish_reason == "length" for a in answers.values())
    assert engine.stats.num_discarded_tokens == 0
    assert engine.stats.num_queued_active == 8 * engine.stats.num_queued_steps, "a slot was empty while rows waited"


def test_a_row_of_nan_ends_alone_and_its_blocks_are_not_found_again(loaded):
    weight = loaded.model.get_input_embeddings().weight
    before = weight[VOCAB_SIZE - 1].clone()
    rows = [(p[p != VOCAB_SIZE - 1], params, False) for p, params, _ in make_rows(6, 12) if len(p) > 2]
    rows = [(p, SamplingParams(max_tokens=params.max_tokens, ignore_eos=True), False) for p, params, _ in rows]
    poison = np.full(40, VOCAB_SIZE - 1, dtype=np.int32)
    expected = tokens(run(Engine(loaded, EngineConfig(max_num_seqs=4)), rows))
    with torch.no_grad():
        weight[VOCAB_SIZE - 1] = float("nan")
    try:
        for max_tokens in (1, 2, 9):  # out of its slot when it is known to be bad, and still in it
            poisoned = [(poison, SamplingParams(max_tokens=max_tokens, ignore_eos=True), False), *rows]
            engine = Engine(loaded, EngineConfig(max_num_seqs=3, decode_steps=4))
            answers = tokens(run(engine, poisoned))
            assert answers.pop((0, 0)) == ([], "nan_logits")
            assert {(i - 1, s): a for (i, s), a in answers.items()} == expected
            hashes = engine._blocks.hashes(poison)
            assert not engine._blocks.find_prefix(hashes, len(poison)).blocks
    finally:
        with torch.no_grad():
            weight[VOCAB_SIZE - 1] = before


@pytest.mark.parametrize("disabled", [without(), without("mixed")], ids=["mixed", "apart"])
def test_nobody_begins_with_the_prompt_of_a_row_that_turns_out_to_be_bad(plain, disabled):
    """A NaN further on spoils the whole chunk: attention gives it the weight 0, and 0 x NaN is NaN."""
    weight = plain.model.get_input_embeddings().weight
    before = weight[VOCAB_SIZE - 1].clone()
    shared = np.arange(3, 35, dtype=np.int32)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    rows = [(np.append(shared, np.arange(index, index + 5)).astype(np.int32), params, False) for index in range(5, 13)]
    poisoned = [(np.append(shared, [VOCAB_SIZE - 1, 5]).astype(np.int32), params, False), *rows]
    with torch.no_grad():
        weight[VOCAB_SIZE - 1] = float("nan")
    try:
        expected = tokens(run(Engine(plain, EngineConfig(max_num_seqs=4)), rows))  # some choose that token themselves
        assert sum(reason == "length" for _, reason in expected.values()) > 4
        for decode_steps in (2, 8):
            engine = Engine(plain, EngineConfig(max_num_seqs=4, decode_steps=decode_steps, disabled=disabled))
            answers = tokens(run(engine, poisoned))
            assert answers.pop((0, 0)) == ([], "nan_logits")
            assert {(index - 1, sample): answer for (index, sample), answer in answers.items()} == expected
            assert engine.stats.num_cached_tokens > 0
    finally:
        with torch.no_grad():
            weight[VOCAB_SIZE - 1] = before


def test_blocks_that_hold_nan_reach_no_row(loaded):
    rows = make_rows(8, 16)
    expected = tokens(run(Engine(loaded, EngineConfig(max_num_seqs=4)), rows))
    engine = Engine(loaded, EngineConfig(max_num_seqs=5, decode_steps=4), capture=Recorder())
    for spec in loaded.layers:
        for cache in engine._runner.kv_cache.layer(spec.layer_idx):
            cache.fill_(float("nan"))
    assert tokens(run(engine, rows)) == expected


class Traces(Recorder):
    """Keeps the operators of a step and the tensors they worked on, and nothing of its Python: as a CUDA graph does."""

    def __call__(self, run):
        run()
        self.num_recorded += 1
        return make_fx(run)()


def test_a_recorded_step_needs_nothing_of_the_host(loaded, plain, monkeypatch):
    """What was computed from numbers of the host, and not read from the static buffers, would be the same each time."""
    monkeypatch.setattr("cbgen.engine.cuda_graph._WANTED_TO_RECORD", 10**9)  # the reference loops over prompts
    rows = [
        (prompt, SamplingParams(max_tokens=p.max_tokens, stop_token_ids=p.stop_token_ids), has_text_stop)
        for prompt, p, has_text_stop in make_rows(1, 30)
    ]  # greedy: the reference looks at other parameters
    expected = tokens(run(Engine(loaded, EngineConfig(max_num_seqs=4)), rows))
    for config in ({"max_num_seqs": 6}, {"max_num_seqs": 11, "max_num_batched_tokens": 16}):
        recorder = Traces()
        engine = Engine(plain, EngineConfig(decode_steps=4, **config), capture=recorder)
        assert tokens(run(engine, rows)) == expected
        assert recorder.num_recorded == len(engine.rounds.graphs) >= 1
        assert engine.stats.num_out_of_memory == 0


def test_plain_operators_do_rounds_with_prompts(loaded, plain):
    """The reference loops over prompts on the host."""
    rows = make_rows(2, 24)
    engine = Engine(plain, EngineConfig(max_num_seqs=6, decode_steps=4))
    engine._run = lambda output: pytest.fail("a round was done as a step")
    rows = [row for row in rows if row[1].repetition_penalty == 1 and len(row[1].stop_token_ids) < 16]
    assert tokens(run(engine, rows)) == tokens(run(Engine(loaded, EngineConfig(max_num_seqs=4)), rows))


class Copies(TorchDispatchMode):
    """Notes the copies into memory of some tensor: whether torch would do each as one transfer."""

    def __init__(self, tensor):
        super().__init__()
        self.storage, self.are_whole = tensor.untyped_storage().data_ptr(), []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.copy_.default and args[0].untyped_storage().data_ptr() == self.storage:
            self.are_whole.append(
                args[0].is_contiguous() and args[1].is_contiguous() and args[0].dtype == args[1].dtype
            )
        return operator(*args, **(kwargs or {}))


def test_tokens_come_to_the_host_in_one_transfer_each_round(loaded):
    """Else torch copies to memory that is not pinned first, and a launch waits for the steps it has launched."""
    engine = Engine(loaded, EngineConfig(max_num_seqs=6, decode_steps=8), capture=Recorder())
    with Copies(engine.rounds._landing) as copies:
        run(engine, make_rows(12, 16), check=False)
    assert copies.are_whole == [True] * engine.rounds._num_rounds
    assert engine.rounds._num_rounds > 10


def test_steps_up_to_the_greatest_length_have_block_tables_no_wider_than_there_are(loaded, monkeypatch):
    widths = []
    gather_step = ReferenceOperators.gather_step

    def watched(self, state, slots, num_columns, block_size):
        widths.append((num_columns, state.block_tables.shape[1]))
        return gather_step(self, state, slots, num_columns, block_size)

    monkeypatch.setattr(type(loaded.operators), "gather_step", watched)
    token_ids = np.arange(3, 40, dtype=np.int32)
    lengths = {9: 39, 20: 12, 33: 15}  # prompt -> answer; two rows end at the greatest length, at different times
    rows = [(token_ids[:p], SamplingParams(max_tokens=m, ignore_eos=True), False) for p, m in lengths.items()]
    engine = Engine(loaded, EngineConfig(max_num_seqs=3, decode_steps=32, max_model_len=48))
    answers = run(engine, rows)
    assert [len(answers[index, 0].token_ids) for index in range(3)] == [*lengths.values()]
    assert max(num_columns for num_columns, _ in widths) == widths[0][1] == 3


class Forgets(Recorder):
    """Keeps nothing of Python of what it recorded, as a CUDA graph does, and cannot run it."""

    def __call__(self, run):
        run()
        return lambda: pytest.fail("there is nothing to replay")


def test_an_engine_that_is_dropped_is_gone_at_once(loaded):
    """Its graphs hold gigabytes, and torch frees with them what graphs recorded later on the same stream use."""
    engine = Engine(loaded, EngineConfig(max_num_seqs=3, decode_steps=4), capture=Forgets())
    engine.rounds.record(StepShape(2, max_context_len=16))
    assert len(engine.rounds.graphs) == 1
    run(engine, [row for row in make_rows(3, 6) if row[1].max_tokens == 1])
    dropped = weakref.ref(engine.rounds), weakref.ref(engine.rounds.graphs), weakref.ref(engine._runner)
    gc.disable()
    try:
        del engine
        assert [reference() for reference in dropped] == [None] * 3
    finally:
        gc.enable()


class FailsToRecord(Recorder):
    """Records some steps, then none."""

    def __call__(self, run):
        run()
        if self.num_recorded == 1:
            raise CaptureError("operation not permitted when stream is capturing")
        self.num_recorded += 1
        return run


def test_a_model_that_cannot_be_recorded_runs_all_the_same_and_says_so(loaded, monkeypatch):
    monkeypatch.setattr("cbgen.engine.cuda_graph._WANTED_TO_RECORD", 1)
    rows = make_rows(9, 24)
    engine = Engine(loaded, EngineConfig(max_num_seqs=13, decode_steps=4), capture=FailsToRecord())
    assert tokens(run(engine, rows)) == tokens(run(Engine(loaded, EngineConfig(max_num_seqs=4)), rows))
    assert engine.stats.graphs_off == "operation not permitted when stream is capturing"


class Fails:
    """A step that raises at some launches."""

    def __init__(self, step, error, when):
        self.step, self.error, self.when, self.count = step, error, when, itertools.count()

    def __call__(self, shape):
        if next(self.count) in self.when:
            raise self.error
        self.step(shape)


@pytest.mark.parametrize("error", [MemoryError("out of memory"), ValueError("no")], ids=["memory", "other"])
def test_a_launch_that_fails_is_done_as_a_step(loaded, error):
    rows = make_rows(11, 24)
    engine = Engine(loaded, EngineConfig(max_num_seqs=6, decode_steps=4))
    engine.rounds._run = Fails(engine.rounds._run, error, {0, 1, 5, 11, 12, 20})
    assert tokens(run(engine, rows)) == tokens(run(Engine(loaded, EngineConfig(max_num_seqs=4)), rows))
    assert (engine.stats.num_out_of_memory > 0) == isinstance(error, MemoryError)


def test_a_device_that_fails_later_ends_the_run(loaded):
    engine = Engine(loaded, EngineConfig(max_num_seqs=6, decode_steps=4))
    collect, count = engine.rounds.collect, itertools.count()

    def broken(flight):
        if next(count) == 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return collect(flight)

    engine.rounds.collect = broken
    with pytest.raises(CbgenError, match="illegal memory access"):
        run(engine, make_rows(11, 24))


def test_admission_that_is_stopped_ends_what_runs(loaded):
    engine = Engine(loaded, EngineConfig(max_num_seqs=4, decode_steps=4))
    rows = [(p, SamplingParams(max_tokens=9, ignore_eos=True), False) for p, _, _ in make_rows(2, 12)]
    for index, (prompt, params, _) in enumerate(rows):
        engine.add(index, prompt, params)
    engine.step()
    engine.stop_admitting()
    ended = 0
    while engine.num_running:
        ended += len(engine.step())
    assert ended == 4
    assert engine.has_unfinished
