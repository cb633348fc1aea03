"""The read-ahead thread: order, batches bounded by rows and bytes, failures handed over, and never a hang."""

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cbgen.config import PromptConfig
from cbgen.data.feed import PromptFeed
from cbgen.data.prompts import PromptBuilder
from cbgen.errors import BrokenInputError, CbgenError
from cbgen.params import SamplingParams
from cbgen.records import Prompt, Row
from tests.helpers import BYTE_VOCAB_SIZE, ByteTokenizer, make_row


class Recording:
    """Builds prompts, and notes the size of each batch."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._builder = PromptBuilder(
            ByteTokenizer(), PromptConfig(), SamplingParams(max_tokens=1), 10_000_000, BYTE_VOCAB_SIZE
        )

    def build(self, rows: list[Row]) -> list[Prompt | Row]:
        self.sizes.append(len(rows))
        return self._builder.build(rows)


def drain(feed: PromptFeed) -> list[int]:
    indices = []
    while not feed.exhausted:
        item = feed.peek(wait=True)
        if item is not None:
            assert feed.peek(wait=False) is item
            feed.take()
            indices.append(item.row.index if isinstance(item, Prompt) else item.index)
    return indices


def make_feed(rows: Iterator[Row], builder: Any = None) -> PromptFeed:
    return PromptFeed(rows, builder or Recording())


def test_prompts_come_in_order_and_then_the_end() -> None:
    builder = Recording()
    with make_feed((make_row(number, prompt="a") for number in range(500)), builder) as feed:
        assert drain(feed) == list(range(500))
    assert feed.failure is None
    assert max(builder.sizes) <= 64
    assert sum(builder.sizes) == 500


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": "x" * (1 << 20)},
        {"messages": [{"role": "user", "content": "x" * (1 << 20)}]},
        {"prompt": "a", "other": {"deep": [b"x" * (1 << 20)]}},
        {"prompt": [5] * (1 << 17)},
    ],
)
def test_batches_of_large_rows_end_at_a_byte_bound(columns: dict[str, Any]) -> None:
    builder = Recording()
    with make_feed((make_row(number, **columns) for number in range(10)), builder) as feed:
        assert drain(feed) == list(range(10))
    assert max(builder.sizes) == 4


def test_engine_that_takes_nothing_holds_the_reader_back() -> None:
    taken = itertools.count()
    rows = (make_row(next(taken), prompt="a") for _ in range(100_000))
    with make_feed(rows) as feed:
        while feed.peek(wait=True) is None:
            pass
        feed._thread.join(0.3)
    feed._thread.join()
    assert next(taken) <= 8 + 64 * 6


def test_failure_of_the_input_comes_after_the_rows_before_it() -> None:
    def rows() -> Iterator[Row]:
        yield from (make_row(number, prompt="a") for number in range(10))
        raise BrokenInputError("torn")

    with make_feed(rows()) as feed:
        found = drain(feed)
    assert isinstance(feed.failure, BrokenInputError)
    assert found == list(range(10))


def test_base_exception_is_handed_over_too() -> None:
    class Panic(BaseException):
        pass

    def rows() -> Iterator[Row]:
        raise Panic
        yield

    with make_feed(rows()) as feed:
        assert drain(feed) == []
    assert isinstance(feed.failure, Panic)


@pytest.mark.parametrize("num_before", [0, 3])
def test_thread_that_died_without_a_word_is_a_failure_not_a_hang(
    monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    def work(self: PromptFeed, rows: Iterator[Row], builder: Any) -> None:
        self._put([make_row(number, prompt="a") for number in range(num_before)])

    monkeypatch.setattr(PromptFeed, "_work", work)
    with make_feed(iter(())) as feed:
        assert drain(feed) == list(range(num_before))
    assert isinstance(feed.failure, CbgenError)
    assert "died" in str(feed.failure)


def test_peek_without_waiting_returns_at_once() -> None:
    gate = threading.Event()

    def rows() -> Iterator[Row]:
        gate.wait()
        yield make_row(0, prompt="a")

    with make_feed(rows()) as feed:
        assert feed.peek(wait=False) is None
        assert not feed.exhausted
        gate.set()
        assert drain(feed) == [0]


def test_leaving_the_feed_ends_the_thread() -> None:
    with make_feed(make_row(number, prompt="a") for number in itertools.count()) as feed:
        pass
    feed._thread.join(10)

    assert not feed._thread.is_alive()
