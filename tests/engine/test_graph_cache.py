"""Which shapes are recorded, when, and what a step that is not recorded gets instead."""

import gc
import random
import weakref

import pytest

from cbgen.engine import cuda_graph
from cbgen.engine.cuda_graph import CaptureError, GraphCache, StepShape, padded, padded_rows, padded_tokens
from cbgen.engine.preparation import prepare
from cbgen.engine.rounds import graph_bytes
from cbgen.errors import CbgenError
from tests.engine.parity import load
from tests.models import build_model


class Device:
    """Notes what is done to it, in order."""

    def __init__(self, error=None, fails_at=10**9):
        self.done, self.error, self.fails_at = [], error, fails_at

    def capture(self, run):
        run()
        if sum(what == "recorded" for what, _ in self.done) >= self.fails_at:
            raise self.error
        shape = self.done[-1][1]
        self.done.append(("recorded", shape))
        return lambda: self.done.append(("replayed", shape))

    def cache(self, slots=256, context=4096):
        return GraphCache(
            self.capture,
            lambda shape: self.done.append(("blank", shape)),
            lambda shape: self.done.append(("ran", shape)),
            slots,
            context,
        )

    def recorded(self):
        return [shape for what, shape in self.done if what == "recorded"]


def random_shape(rng, slots=256):
    num_prefills = rng.choice([0, 0, rng.randint(1, 20)])
    num_tokens = num_prefills + rng.randint(0, 2000) if num_prefills else 0
    return StepShape(rng.randint(1, slots), num_prefills, num_tokens, rng.randint(1, 4096))


def test_padding_covers_and_is_bounded():
    rng = random.Random(0)
    for _ in range(2000):
        shape = random_shape(rng)
        best = padded(shape, 4096)
        assert best.covers(shape)
        assert padded(best, 4096) == best
        assert best.num_decodes < shape.num_decodes + 8 or best.num_decodes <= 1.27 * shape.num_decodes
        assert best.num_prefill_tokens <= max(
            64, 1.25 * shape.num_prefill_tokens + 64 * (shape.num_prefill_tokens < 512)
        )
    assert [padded_rows(n) for n in (1, 3, 5, 33, 65, 257, 513, 1000)] == [1, 4, 8, 40, 80, 288, 576, 1024]
    assert [padded_tokens(n) for n in (1, 65, 500, 513, 1025, 7000)] == [64, 128, 512, 640, 1280, 7168]


def test_the_largest_of_a_context_is_recorded_first_and_serves_all_until_others_pay():
    device = Device()
    cache = device.cache()
    for _ in range(4):
        shape, replay = cache.find(StepShape(20, max_context_len=100))
        assert shape == StepShape(256, max_context_len=512)
        replay()
    assert device.done[:3] == [("blank", shape), ("ran", shape), ("recorded", shape)]
    assert device.done[3:] == [("replayed", shape)] * 4
    for _ in range(20):
        shape, _ = cache.find(StepShape(20, max_context_len=100))
    assert shape == StepShape(24, max_context_len=512)
    assert cache.find(StepShape(240, max_context_len=300))[0] == StepShape(256, max_context_len=512), "close enough"
    assert device.recorded() == [StepShape(256, max_context_len=512), shape]
    assert cache.find(StepShape(20, max_context_len=513))[0] == StepShape(256, max_context_len=1024)


def test_a_step_with_prompts_is_recorded_once_it_was_wanted_often():
    device = Device()
    cache = device.cache()
    shape = StepShape(250, 3, 500, 900)
    found = [cache.find(shape) for _ in range(9)]
    assert [replay is None for _, replay in found] == [True] * 7 + [False] * 2
    assert found[0][0] == shape
    assert found[-1][0] == StepShape(256, 8, 512, 1024)
    assert cache.find(StepShape(0, 3, 500, 900)) == (StepShape(0, 3, 500, 900), None), "without decodes: as it is"


def test_a_step_with_few_prompt_tokens_does_not_run_as_one_with_many():
    """Padding of prompts is arithmetic: it costs more than the launches that a graph saves."""
    device = Device()
    cache = device.cache()
    for _ in range(8):
        many = cache.find(StepShape(250, 3, 2000, 900))[0]
    assert many == StepShape(256, 8, 2048, 1024)
    few = StepShape(250, 3, 100, 900)
    found = [cache.find(few) for _ in range(9)]
    assert found[:7] == [(few, None)] * 7
    assert found[-1][0] == StepShape(256, 8, 128, 1024)
    assert cache.find(StepShape(250, 3, 1900, 900))[0] == many
    assert cache.find(StepShape(200, 3, 1900, 900))[0] == many, "close enough"


@pytest.mark.parametrize("seed", range(5))
def test_what_is_found_always_covers_and_the_number_is_bounded(seed, monkeypatch):
    monkeypatch.setattr(cuda_graph, "MOST_GRAPHS", 12)
    monkeypatch.setattr(cuda_graph, "_WANTED_TO_RECORD", 2)
    rng, device = random.Random(seed), Device()
    cache = device.cache()
    for _ in range(600):
        wanted = random_shape(rng)
        shape, replay = cache.find(wanted)
        assert shape.covers(wanted)
        assert replay is not None or shape == wanted
    assert len(cache) == len(device.recorded()) == 12


@pytest.mark.parametrize("reason", ["it waits for the host", "RuntimeError: Triton Error [CUDA]: invalid argument"])
def test_a_step_that_cannot_be_recorded_runs_as_it_is_from_then_on(reason):
    device = Device(CaptureError(reason), fails_at=1)
    cache = device.cache()
    assert cache.find(StepShape(200))[1] is not None
    assert cache.find(StepShape(200, max_context_len=600)) == (StepShape(200, max_context_len=600), None)
    assert cache.reason == reason
    assert len(cache) == 0


def test_without_memory_for_another_those_that_are_there_go_on():
    device = Device(MemoryError("CUDA out of memory"), fails_at=1)
    cache = device.cache()
    assert cache.find(StepShape(200))[1] is not None
    for _ in range(3):
        assert cache.find(StepShape(200, max_context_len=600)) == (StepShape(200, max_context_len=600), None)
    assert cache.find(StepShape(100))[1] is not None
    assert cache.reason == ""
    assert sum(what == "blank" for what, _ in device.done) == 2


def test_a_device_that_breaks_while_a_step_is_recorded_ends_the_run():
    cache = Device(RuntimeError("CUDA error: an illegal memory access was encountered"), fails_at=0).cache()
    with pytest.raises(CbgenError, match="illegal memory access"):
        cache.find(StepShape(200))


def test_a_step_that_fails_on_padding_is_not_recorded():
    device = Device(ValueError("a layer wants rows"), fails_at=0)
    cache = device.cache()
    assert cache.find(StepShape(200))[1] is None
    assert cache.reason == "ValueError: a layer wants rows"


class Graph:
    """As torch's: it knows nothing of what was recorded."""

    def replay(self):
        """Do nothing."""


def test_graphs_after_the_first_are_given_a_twentieth_at_most(tmp_path):
    loaded = prepare(load(build_model("llama-ratio-3", tmp_path)), set(), print)
    free = iter([1000, 900, 890, 870])
    assert graph_bytes(loaded, lambda run: run, 100, 40, lambda: next(free)) == 100 + 50


def test_memory_of_graphs_is_measured_on_three_of_them_and_free_again(tmp_path):
    loaded = prepare(load(build_model("llama-ratio-3", tmp_path)), set(), print)
    free = iter([100_000, 99_700, 99_695, 99_685])
    graphs = []

    def capture(run):
        run()
        graph = Graph()
        graphs.append(weakref.ref(graph))
        return graph.replay

    gc.disable()  # which could be late: the KV cache is made right after
    try:
        assert graph_bytes(loaded, capture, 100, 40, lambda: next(free)) == 300 + 63 * 10
        assert [graph() for graph in graphs] == [None] * 3
    finally:
        gc.enable()
