"""Steps that fail: what is short of memory or cannot compute a row ends that row, and no other row notices."""

import dataclasses
import json
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from cbgen.config import EngineConfig
from cbgen.engine.containment import RowsInSuccession, TokenLimit, causes, judge, root_cause, short_memory_named
from cbgen.engine.engine import Engine
from cbgen.engine.kv_cache import bytes_per_block
from cbgen.engine.preparation import prepare
from cbgen.engine.sequence import FinishReason
from cbgen.errors import CbgenError, ModelError
from cbgen.params import SamplingParams
from tests.engine.parity import load
from tests.models import VOCAB_SIZE, build_model

POISON = VOCAB_SIZE - 1  # prompts that hold this token are the ones a failing runner fails on
MEMORY_ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4000000000000000 bytes."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    torch.AcceleratorError("CUDA error: out of memory", 2),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(build_model("llama-ratio-3", tmp_path_factory.mktemp("m")))


class FailingRunner:
    """A real runner that raises before or after the forward pass, as `fails(model_input)` says."""

    def __init__(self, engine, fails, *, late=False):
        self.engine, self.fails, self.late = engine, fails, late
        self.run_really = engine._runner.run
        self.calls = []  # tokens of each pass, in order; failed ones negative
        self.num_released = 0
        engine._runner.run = self.run
        engine._runner.release_memory = self.release_memory

    def run(self, model_input):
        error = self.fails(model_input)
        self.calls.append(-model_input.num_tokens if error else model_input.num_tokens)
        if error and not self.late:
            raise error
        token_ids = self.run_really(model_input)
        if error:
            raise error
        return token_ids

    def release_memory(self):
        self.num_released += 1


def make_prompts(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, POISON, rng.integers(1, 30)).astype(np.int32) for _ in range(num_rows)]


def poisoned(prompts, rows):
    """In front, so that when it fails there is more of the row in the step."""
    return [np.insert(p, 0, POISON).astype(np.int32) if i in rows else p for i, p in enumerate(prompts)]


def has_poison(model_input):
    return POISON in model_input.input_ids


def answer(engine, prompts, params=None, max_steps=5_000):
    """Generations by row, in the order of ending; the engine's books are checked after every step."""
    params = params or SamplingParams(max_tokens=12, ignore_eos=True)
    params = dataclasses.replace(params, logit_bias=((POISON, -100.0),))  # it comes in prompts only
    for index, prompt in enumerate(prompts):
        for sample in range(params.n):
            engine.add(index, prompt, params, random_stream=(1, index, sample))
    answers = {}
    for _ in range(max_steps):
        if not engine.has_unfinished:
            return answers
        for generation in engine.step():
            answers.setdefault(generation.index, []).append(generation)
        engine.check_integrity()
    raise AssertionError("the engine does not come to an end")


def texts(answers):
    return {index: [g.token_ids for g in generations] for index, generations in answers.items()}


# -- out of memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["before computing", "after computing"])
@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("most_tokens", [1, 2, 7, 30])
def test_steps_beyond_the_memory_are_run_in_parts_with_the_same_answers(loaded, most_tokens, batching, late):
    prompts = make_prompts(20)
    config = EngineConfig(max_num_seqs=12, max_num_batched_tokens=64, batching=batching)
    expected = answer(Engine(loaded, config), prompts)
    engine = Engine(loaded, config)
    error = MEMORY_ERRORS[most_tokens % len(MEMORY_ERRORS)]
    runner = FailingRunner(
        engine, lambda model_input: error if model_input.num_tokens > most_tokens else None, late=late
    )
    assert answer(engine, prompts) == expected
    failed = sum(tokens < 0 for tokens in runner.calls)
    assert 0 < failed == engine.stats.num_out_of_memory == runner.num_released
    assert max(runner.calls) <= most_tokens
    assert engine.stats.num_preemptions == 0, "a smaller step costs no row its cache"


@pytest.mark.parametrize("most_rows", [1, 3])
def test_steps_of_too_many_rows_are_run_in_parts(loaded, most_rows):
    prompts = make_prompts(15)
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=32)
    expected = answer(Engine(loaded, config), prompts)
    engine = Engine(loaded, config)
    FailingRunner(engine, lambda m: MemoryError() if len(m.context_lens) > most_rows else None)
    assert answer(engine, prompts) == expected


def test_a_long_prompt_is_read_in_the_chunks_that_memory_allows(loaded):
    prompt = np.arange(3, 83, dtype=np.int32)
    engine = Engine(loaded, EngineConfig(max_num_seqs=2, max_num_batched_tokens=128))
    runner = FailingRunner(engine, lambda m: MemoryError() if m.num_tokens > 30 else None)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    expected = answer(Engine(loaded, EngineConfig(max_num_seqs=2)), [prompt], params)
    assert answer(engine, [prompt], params) == expected
    assert runner.calls == [-80, -40, 20, 20, 20, 20, 1, 1]


def test_memory_that_was_short_for_a_while_is_used_again(loaded):
    engine = Engine(loaded, EngineConfig(max_num_seqs=8, max_num_batched_tokens=8))
    short = [True]
    runner = FailingRunner(engine, lambda m: MemoryError() if short and m.num_tokens > 1 else None)
    for index in range(8):
        engine.add(index, np.array([5], dtype=np.int32), SamplingParams(max_tokens=126, ignore_eos=True))
    engine.step()
    assert runner.calls == [-8, -4, -2] + [1] * 8
    short.clear()
    sizes = []
    while engine.has_unfinished and len(sizes) < 120:
        runner.calls.clear()
        engine.step()
        sizes.append(max(runner.calls))
    assert sizes == [1] * 63 + [2] * 57
    assert engine.stats.num_out_of_memory == 3


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_a_row_that_fits_in_no_memory_ends_alone(loaded, slots):
    bad = {0, 3, 4, 5, 11}
    prompts = make_prompts(12)
    config = EngineConfig(max_num_seqs=slots, max_num_batched_tokens=64)
    expected = answer(Engine(loaded, config), prompts)
    engine = Engine(loaded, config)
    FailingRunner(engine, lambda m: MEMORY_ERRORS[0] if has_poison(m) else None)
    answers = answer(engine, poisoned(prompts, bad))
    assert {i for i, (g, *_) in answers.items() if g.finish_reason == "out_of_memory"} == bad
    assert answers[3][0].detail == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert all(answers[i] == expected[i] for i in set(range(12)) - bad)
    assert engine._token_limit.value == 64, "it was the rows' fault"


def test_no_memory_at_all_ends_every_row_and_then_the_work(loaded):
    engine = Engine(loaded, EngineConfig(max_num_seqs=4))
    FailingRunner(engine, lambda m: MemoryError())
    answers = answer(engine, make_prompts(10), max_steps=20)
    assert {g.finish_reason for generations in answers.values() for g in generations} == {"out_of_memory"}
    assert len(answers) == 10


def test_a_failing_step_amid_preemption_changes_no_answer(loaded):
    """Too few blocks, and at random steps too little memory or a passing fault: no answer changes, no block is lost."""
    prompts = make_prompts(16)
    params = SamplingParams(max_tokens=20, temperature=0.8, ignore_eos=True)
    expected = answer(Engine(loaded, EngineConfig(max_num_seqs=1)), prompts, params)
    pool = 5 * bytes_per_block(loaded.layers, 16, loaded.dtype)
    config = EngineConfig(
        max_num_seqs=8,
        max_num_batched_tokens=9,
        max_model_len=64,
        kv_cache_memory=pool,
        disabled=frozenset({"prediction"}),
    )
    for seed in range(5):
        rng = np.random.default_rng(seed)
        engine = Engine(loaded, config)
        FailingRunner(engine, lambda m, rng=rng: MemoryError() if m.num_tokens > rng.integers(1, 12) else None)
        assert texts(answer(engine, prompts, params)) == texts(expected)
        assert engine.stats.num_preemptions > 0 < engine.stats.num_out_of_memory


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce a limit on address space")
def test_a_process_that_really_runs_out_of_memory_answers_the_same(tmp_path):
    """The real allocator's error: a step of all tokens needs 256 MB, and 150 MB are left."""
    wide = build_model("llama-ratio-3", tmp_path, intermediate_size=32_768, max_position_embeddings=256)
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.short_of_memory", wide], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["equal"], result["rows"]) == (True, 16)
    assert result["out_of_memory"][0] == 0 < result["out_of_memory"][1]


# -- other faults -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [2, 50])
@pytest.mark.parametrize("bad", [{17}, {0, 1, 2, 3, 49}], ids=["one row", "several, in succession"])
def test_a_row_that_breaks_the_model_ends_alone_among_fifty(loaded, slots, bad):
    prompts, params = make_prompts(50), SamplingParams(max_tokens=6, ignore_eos=True)
    config = EngineConfig(max_num_seqs=slots, max_num_batched_tokens=256)
    expected = answer(Engine(loaded, config), prompts, params)
    engine = Engine(loaded, config)
    if slots == 2:  # two of them fill a step; see below for what three steps of nothing else mean
        bad = bad - {1, 2}
    FailingRunner(engine, lambda m: ValueError("no such token\nsecond line") if has_poison(m) else None)
    answers = answer(engine, poisoned(prompts, bad), params)
    assert {i for i, (g, *_) in answers.items() if g.finish_reason == "engine_error"} == bad
    assert {answers[i][0].detail for i in bad} == {"ValueError: no such token"}
    assert all(answers[i] == expected[i] for i in set(range(50)) - bad)
    assert engine.stats.num_out_of_memory == 0


def test_a_row_that_breaks_the_sampler_ends_alone(loaded, monkeypatch):
    """An id beyond the vocabulary should have been refused before; if not, it is an index error in the sampler."""
    engine = Engine(loaded, EngineConfig(max_num_seqs=4))
    good, bad = SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, logit_bias=((10**6, 1.0),))
    for index in range(4):
        engine.add(index, np.array([5, 6], dtype=np.int32), bad if index == 2 else good)
    reasons = {}
    while engine.has_unfinished:
        reasons |= {g.index: g.finish_reason for g in engine.step()}
        engine.check_integrity()
    assert reasons.pop(2) == "engine_error"
    assert set(reasons.values()) <= {"stop", "length"}


def test_a_fault_in_the_middle_of_a_row_ends_it_there(loaded):
    engine = Engine(loaded, EngineConfig(max_num_seqs=4))
    prompts = make_prompts(4)
    expected = answer(Engine(loaded, EngineConfig(max_num_seqs=4)), prompts)
    victim = len(prompts[2])
    FailingRunner(
        engine, lambda m: KeyError("x") if any(s.index == 2 and s.num_tokens > victim + 4 for s in m.sampling) else None
    )
    answers = answer(engine, prompts)
    (ended,) = answers.pop(2)
    assert (ended.finish_reason, ended.detail) == ("engine_error", "KeyError: 'x'")
    assert ended.token_ids == expected.pop(2)[0].token_ids[:5]
    assert answers == expected


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_a_model_that_fails_on_every_row_ends_the_run(loaded, slots):
    engine = Engine(loaded, EngineConfig(max_num_seqs=slots))
    FailingRunner(engine, lambda m: ValueError("bad weights\nmore"))
    with pytest.raises(CbgenError, match=r"the model fails on every row \(ValueError: bad weights\)") as failure:
        answer(engine, make_prompts(20))
    assert failure.value.exit_code == 1
    assert engine.stats.num_steps == {1: 3, 2: 2, 8: 1}[slots], "rows that fail together are left for a run that works"


def test_three_bad_rows_one_by_one_with_a_good_step_in_between_are_only_rows(loaded):
    engine = Engine(loaded, EngineConfig(max_num_seqs=1))
    bad = {0, 1, 3, 4, 6, 7}
    FailingRunner(engine, lambda m: ValueError() if has_poison(m) else None)
    answers = answer(engine, poisoned(make_prompts(9), bad))
    assert {i for i, (g, *_) in answers.items() if g.finish_reason == "engine_error"} == bad


@pytest.mark.parametrize("slots", [1, 16])
def test_samples_of_one_bad_row_count_as_one(loaded, slots):
    engine = Engine(loaded, EngineConfig(max_num_seqs=slots))
    params = SamplingParams(n=5, max_tokens=3, temperature=1.0, ignore_eos=True)
    FailingRunner(engine, lambda m: ValueError() if has_poison(m) else None)
    prompts = make_prompts(4)
    answers = answer(engine, poisoned(prompts, {1}), params)
    assert [(g.finish_reason, g.sample) for g in answers.pop(1)] == [("engine_error", 0)]
    expected = answer(Engine(loaded, EngineConfig(max_num_seqs=8)), prompts, params)
    del expected[1]
    for generations in (*answers.values(), *expected.values()):
        generations.sort(key=lambda g: g.sample)
    assert answers == expected


def test_samples_of_a_row_of_nan_end_with_it(loaded):
    engine = Engine(loaded, EngineConfig(max_num_seqs=2))
    engine._runner.run = lambda m: np.array([-1 if s.index == 0 and s.output_token_ids else 5 for s in m.sampling])
    params = SamplingParams(n=4, max_tokens=3, ignore_eos=True)
    answers = answer(engine, make_prompts(2), params, max_steps=12)
    assert answers[0][0].finish_reason == "nan_logits"
    assert len(answers[0]) <= 2, "samples that waited never ran"
    assert [g.finish_reason for g in answers[1]] == ["length"] * 4


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(3), CbgenError("stop")], ids=lambda e: type(e).__name__
)
def test_what_must_end_the_run_ends_it(loaded, error):
    engine = Engine(loaded, EngineConfig(max_num_seqs=2))
    FailingRunner(engine, lambda m: error)
    engine.add(0, np.array([5], dtype=np.int32), SamplingParams(max_tokens=3))
    with pytest.raises(type(error)):
        engine.step()
    engine.check_integrity()


def test_memory_of_a_failed_step_is_free_before_the_next_try(loaded):
    """No exception, traceback or frame may hold the tensors of the step that ran out of memory."""
    engine = Engine(loaded, EngineConfig(max_num_seqs=4))
    held, alive = [], []

    def run(model_input):
        alive.append(sum(reference() is not None for reference in held))
        tensor = torch.zeros(1000)
        held.append(weakref.ref(tensor))
        if len(held) < 4:
            raise MemoryError
        return np.full(len(model_input.sampling), 5)

    engine._runner.run = run
    answer(engine, make_prompts(4), SamplingParams(max_tokens=1))
    assert len(alive) >= 4
    assert not any(alive)


# -- the parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", MEMORY_ERRORS, ids=lambda error: f"{type(error).__name__} {error}"[:30])
def test_every_kind_of_short_memory_is_known(error):
    assert judge(error).reason is FinishReason.OUT_OF_MEMORY


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("an illegal memory access was encountered", 700),
        RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be"),
        RuntimeError("HIP error: invalid device function"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("CUDA driver error: unknown error"),
    ],
    ids=str,
)
def test_a_broken_device_ends_the_run(error):
    with pytest.raises(CbgenError, match=r"^the device failed \(.*Error: [^\n]*\); finished rows are kept, run"):
        judge(error)


def after(error, first):
    """An exception raised while another one was being handled."""
    error.__context__ = first
    return error


def end_of_capture():
    """What leaving a recording raises that has failed; it does not say why."""
    return torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture", 901)


def test_a_recording_that_ran_out_of_memory_is_short_of_memory():
    failure = judge(after(end_of_capture(), MEMORY_ERRORS[0]))
    assert failure.reason is FinishReason.OUT_OF_MEMORY
    assert failure.detail.startswith("OutOfMemoryError: CUDA out of memory.")


def test_a_recording_that_is_not_possible_leaves_the_device_well():
    looked = torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing", 900)
    for error in (looked, end_of_capture(), after(end_of_capture(), looked)):
        assert judge(error).reason is FinishReason.ENGINE_ERROR
    assert root_cause(after(end_of_capture(), looked)) == f"AcceleratorError: {looked}"


def test_causes_end_even_in_a_circle():
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__cause__ = second, first
    assert list(causes(second)) == [second, first]
    hidden = after(KeyError("mine"), MemoryError())
    hidden.__suppress_context__ = True  # raise ... from None
    assert judge(hidden).reason is FinishReason.ENGINE_ERROR


def test_short_memory_before_the_first_step_is_one_sentence(loaded, monkeypatch):
    def no_cache(*_):
        raise MEMORY_ERRORS[0]

    monkeypatch.setattr("cbgen.engine.model_runner.KVCache", no_cache)
    with pytest.raises(ModelError, match=r"^no memory for the KV cache: lower .* \(OutOfMemoryError: CUDA out of"):
        Engine(loaded, EngineConfig())
    monkeypatch.setattr("cbgen.engine.dry_run.KVCache", no_cache)
    with pytest.raises(ModelError, match=r"^no memory is left to prepare the model: .* \(OutOfMemoryError: CUDA"):
        prepare(loaded, {"native"}, print)


@pytest.mark.parametrize("error", [ValueError("no"), CbgenError("no memory"), KeyboardInterrupt()], ids=repr)
def test_other_faults_pass(error):
    with pytest.raises(type(error)) as raised, short_memory_named("message"):
        raise error
    assert raised.value is error


def test_details_are_one_short_line():
    assert judge(ValueError("")).detail == "ValueError: "
    assert judge(ValueError("a\nb")).detail == "ValueError: a"
    assert len(judge(ValueError("x" * 10_000)).detail) == 300


def test_a_limit_doubles_only_after_a_row_of_good_steps():
    limit = TokenLimit(100)
    limit.step_done()
    limit.halve(100)
    limit.halve(50)
    for _ in range(63):
        limit.step_done()
    limit.halve(25)
    values = []
    for _ in range(64 * 5):
        limit.step_done()
        values.append(limit.value)
    assert values == [12] * 63 + [24] * 64 + [48] * 64 + [96] * 64 + [100] * 65


def test_rows_in_succession_are_forgotten_when_anything_runs():
    rows = RowsInSuccession()
    rows.step_done({1: "a", 2: "b"}, anything_ran=False)
    rows.step_done({3: "c", 4: "d", 5: "e"}, anything_ran=True)
    rows.step_done({}, anything_ran=False)
    rows.step_done({6: "f", 7: "g"}, anything_ran=False)
    with pytest.raises(CbgenError, match=r"every row \(h\)"):
        rows.step_done({8: "h"}, anything_ran=False)
