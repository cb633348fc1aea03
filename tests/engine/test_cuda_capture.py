"""What becomes of a recording that fails, with torch's part of it played by stand-ins: a real one needs a GPU."""

import contextlib
import weakref

import pytest
import torch

from cbgen.engine.cuda_graph import CaptureError, CudaCapture

POOL = (0, 7)


@pytest.fixture
def calls(monkeypatch):
    """Names of what was called of torch, in order."""
    calls = []

    @contextlib.contextmanager
    def recording(graph, *, pool, stream, capture_error_mode):
        calls.append(f"record into {pool}")
        try:
            yield
        except Exception:  # as torch: leaving it raises another, which hides the first
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")  # noqa: B904

    def end_allocate(device, pool):
        calls.append(f"end {pool}")
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")  # torch from 2.12 on

    class Graph:
        def replay(self):
            calls.append("replay")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocate, raising=False)
    return calls


def test_recordings_share_a_pool_and_replay(calls):
    capture = CudaCapture()
    replays = [capture(lambda name=name: calls.append(name)) for name in ("large", "small")]
    for replay in replays:
        replay()
    record = f"record into {POOL}"
    assert calls == ["large", record, "large", "small", record, "small", "replay", "replay"]


def test_a_recording_that_fails_says_why_and_leaves_the_allocator_in_order(calls):
    attempts = iter([None, torch.OutOfMemoryError("CUDA out of memory.\nTried much.")])

    def run():
        if error := next(attempts):
            raise error

    with pytest.raises(CaptureError, match=r"^OutOfMemoryError: CUDA out of memory\.$"):
        CudaCapture()(run)
    assert calls == [f"record into {POOL}", "synchronize", f"end {POOL}"]


def test_what_failed_lives_as_long_as_what_did_not(calls):
    """Torch frees a workspace with it that all graphs of the stream use."""
    capture, graphs = CudaCapture(), []
    make = torch.cuda.CUDAGraph

    def watched():
        graph = make()
        graphs.append(weakref.ref(graph))
        return graph

    torch.cuda.CUDAGraph = watched  # the fixture puts torch's own back
    replay = capture(lambda: None)
    attempts = iter([True, False])

    def run():
        if not next(attempts):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(CaptureError):
        capture(run)
    assert [graph() is None for graph in graphs] == [False, False]
    replay()
    del capture, replay, run
    assert [graph() is None for graph in graphs] == [True, True]


def test_a_device_that_does_not_survive_is_not_used_again(calls, monkeypatch):
    def synchronize():
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    attempts = iter([None, ValueError("no")])

    def run():
        if error := next(attempts):
            raise error

    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        CudaCapture()(run)
