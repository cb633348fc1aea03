"""Whole jobs through the scheduler, with a model that answers by a table: rows come in as the pipeline feeds them."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from cbgen.engine.block_manager import BlockManager
from cbgen.engine.scheduler import Scheduler, SchedulerConfig
from cbgen.engine.sequence import Sequence
from cbgen.engine.waiting import ROWS_PER_SLOT
from cbgen.params import SamplingParams

STOP = 2


@dataclass
class Row:
    """A prompt, how many tokens the model will answer, and the most that the row allows.

    With `cap` None nothing but the length ends the row, and the scheduler knows it; else a stop token does.
    """

    prompt: np.ndarray
    length: int
    cap: int | None = None

    def sequence(self, index):
        cap = self.length if self.cap is None else self.cap
        stops = frozenset() if self.cap is None else frozenset({STOP})
        params = SamplingParams(max_tokens=cap)
        return Sequence(index, self.prompt, params, len(self.prompt) + cap, stop_token_ids=stops)

    def token(self, num_output):
        """The token after `num_output` of the answer; those of different rows differ."""
        is_last = self.cap is not None and num_output == self.length - 1
        return STOP if is_last else 1000 + (int(self.prompt[-1]) * 31 + num_output) % 1000


@dataclass
class Outcome:
    """What became of a job. `admissions` are row indexes in order, preempted rows again."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preempted: int = 0
    num_recomputed_tokens: int = 0
    num_computed_tokens: int = 0
    outputs: dict[int, list[int]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    num_added: int = 0  # tokens that rounds brought
    most_ahead: int = 0  # rows between the first unfinished one and the last one read


def run_job(rows, *, slots, budget, num_blocks, block_size=16, prefix_cache=True, checks=True, **policy):
    """Run all rows to their end; every block a sequence reads holds what the sequence would have written there."""
    longest = max(len(row.prompt) + (row.cap or row.length) for row in rows)
    config = SchedulerConfig(slots, budget, max(longest, block_size), **policy)
    blocks = BlockManager(num_blocks, block_size, slots, config.max_model_len, prefix_cache=prefix_cache)
    scheduler = Scheduler(config, blocks)
    memory = np.full((num_blocks, block_size), -1, dtype=np.int64)  # a token's KV is a fingerprint of all before it
    outcome, following, head, done = Outcome(), 0, 0, set()
    while following < len(rows) or scheduler.has_unfinished:
        window = ROWS_PER_SLOT * slots
        while following < len(rows) and scheduler.num_waiting < window and following - head < window:
            assert scheduler.add(rows[following].sequence(following))
            following += 1
        outcome.most_ahead = max(outcome.most_ahead, following - head)
        output = scheduler.schedule()
        assert output.sequences, "a step that does nothing while rows wait"
        assert output.num_tokens <= budget
        if checks:
            _compute(output, blocks, memory)
        sampling = [s for s, is_ready in zip(output.sequences, output.samples, strict=True) if is_ready]
        tokens = [rows[s.index].token(s.num_tokens - s.num_prompt_tokens) for s in sampling]
        outcome.num_steps += 1
        outcome.num_computed_tokens += output.num_tokens
        for name in ("num_prompt_tokens", "num_cached_tokens", "num_preempted", "num_recomputed_tokens"):
            setattr(outcome, name, getattr(outcome, name) + getattr(output, name))
        for sequence in scheduler.update(output, np.array(tokens, dtype=np.int64)):
            outcome.outputs[sequence.index] = sequence.output_token_ids
            outcome.cached[sequence.index] = sequence.num_cached_tokens
            done.add(sequence.index)
        while head in done:
            head += 1
        if checks:
            scheduler.check_integrity()
    assert blocks.num_free_blocks == num_blocks, "blocks are held although nobody runs"
    assert [outcome.outputs[i] for i in range(len(rows))] == [[r.token(k) for k in range(r.length)] for r in rows]
    return outcome


def run_in_rounds(rows, *, slots, budget, num_blocks, steps, ahead, seed, block_size=16, **policy):
    """The same with rounds of up to `steps` steps, up to `ahead` of them launched before the first is known. A device
    computes every token in the order of the launches, of rows that ended meanwhile, too.
    """
    rng = np.random.default_rng(seed)
    longest = max(len(row.prompt) + (row.cap or row.length) for row in rows)
    config = SchedulerConfig(slots, budget, max(longest, block_size), **policy)
    blocks = BlockManager(num_blocks, block_size, slots, config.max_model_len, prefix_cache=True)
    scheduler = Scheduler(config, blocks)
    memory = np.full((num_blocks, block_size), -1, dtype=np.int64)
    outcome, in_flight, following = Outcome(), deque(), 0
    real = {}  # what the device has of a sequence, the tokens that nobody else knows yet included

    def settle(num_left):
        while len(in_flight) > num_left:
            launched, token_ids = in_flight.popleft()
            finished, num_added = scheduler.resolve(launched, token_ids)
            outcome.num_added += num_added
            for sequence in finished:
                outcome.outputs[sequence.index] = sequence.output_token_ids
            scheduler.check_integrity()

    while following < len(rows) or scheduler.has_unfinished or in_flight:
        while following < len(rows) and scheduler.num_waiting < 2 * slots:
            assert scheduler.add(rows[following].sequence(following))
            following += 1
        num_steps = int(rng.integers(1, steps + 1))
        if scheduler.lacks_blocks(num_steps):
            settle(0)
            num_steps = 1
        output = scheduler.schedule(num_steps) if scheduler.has_unfinished else None
        scheduler.check_integrity()
        if output is None or not output.sequences:
            assert in_flight, "nothing runs, and nothing can"
            settle(0)
            continue
        has_prompts = output.num_decodes < len(output.sequences)
        num_steps = 1 if has_prompts else num_steps
        if not policy.get("mixed", True) and output.num_decodes:  # but for the last token of a prompt
            assert output.num_tokens == len(output.sequences)
        outcome.num_steps += num_steps
        outcome.num_preempted += output.num_preempted
        token_ids = _compute_round(output, num_steps, blocks, memory, rows, real)
        in_flight.append((scheduler.launched(output, num_steps), token_ids))
        scheduler.check_integrity()
        settle(int(rng.integers(0, ahead + 1)))
    assert blocks.num_free_blocks == num_blocks, "blocks are held although nobody runs"
    assert scheduler.num_leaving == 0
    expected = [[row.token(k) for k in range(row.length)] for row in rows]
    assert [outcome.outputs[i] for i in range(len(rows))] == expected
    assert outcome.num_added == sum(map(len, expected))
    return outcome


def _compute_round(output, num_steps, blocks, memory, rows, real):
    """[num_steps, S] tokens; like `_compute`, on what the device knows of each sequence."""
    samples = output.samples
    token_ids = np.full((num_steps, int(samples.sum())), -7, dtype=np.int64)
    for step in range(num_steps):
        column = 0
        for position, sequence in enumerate(output.sequences):
            known = real.setdefault(sequence.index, sequence.prompt_token_ids.tolist())
            start = sequence.num_computed_tokens + step
            stop = start + int(output.num_scheduled_tokens[position]) if not step else start + 1
            is_alive = stop < sequence.max_total_tokens
            if is_alive:
                positions = np.arange(stop)
                prints = np.cumsum(np.array(known[:stop], dtype=np.int64) * (positions % 97 + 1)) + positions
                assert stop <= blocks.capacity(sequence.slot), f"row {sequence.index} writes past its blocks"
                places = blocks.block_tables[sequence.slot, positions // blocks.block_size]
                offsets = positions % blocks.block_size
                held = memory[places, offsets]
                assert (held[:start] == prints[:start]).all(), f"row {sequence.index} reads what is not its own"
                memory[places[start:], offsets[start:]] = prints[start:]
            if samples[position]:
                row = rows[sequence.index]
                num_output = len(known) - sequence.num_prompt_tokens
                if is_alive:
                    token_ids[step, column] = row.token(num_output) if num_output < row.length else 999
                    known.append(int(token_ids[step, column]))
                column += 1
    return token_ids


def _compute(output, blocks, memory):
    """A model whose KV of a token depends on all tokens up to it; what is read must be what would be written."""
    for sequence, count in zip(output.sequences, output.num_scheduled_tokens.tolist(), strict=True):
        start, stop = sequence.num_computed_tokens, sequence.num_computed_tokens + count
        tokens = sequence.tokens_between(0, stop).astype(np.int64)
        prints = np.cumsum(tokens * (np.arange(stop) % 97 + 1)) + np.arange(stop)
        positions = np.arange(stop)
        places = blocks.block_tables[sequence.slot, positions // blocks.block_size], positions % blocks.block_size
        held = memory[places]
        assert (held[:start] == prints[:start]).all(), f"row {sequence.index} reads what is not its own"
        assert (blocks.ref_counts[places[0][start:]] == 1).all(), f"row {sequence.index} writes to a shared block"
        memory[places[0][start:], places[1][start:]] = prints[start:]


def shareable(rows, block_size=16):
    """Of each row, the tokens in full blocks that some earlier row begins with, too; one token is always computed."""
    seen, result = set(), []
    for row in rows:
        data, size = row.prompt.tobytes(), row.prompt.itemsize * block_size
        prefixes = [data[:stop] for stop in range(size, len(data) + 1, size)]
        usable = prefixes[: (len(row.prompt) - 1) // block_size]
        result.append(block_size * sum(prefix in seen for prefix in usable))
        seen.update(prefixes)
    return result


def few_shot_rows(rng, groups=20, rows_per_group=100, arrange="grouped"):
    """Groups that share 600 to 1,200 tokens, with questions of 60 to 120 and answers of 1 to 64 tokens."""
    rows = []
    for _ in range(groups):
        prefix = rng.integers(10, 30_000, rng.integers(600, 1201))
        for _ in range(rows_per_group):
            question = rng.integers(10, 30_000, rng.integers(60, 121))
            prompt = np.concatenate([prefix, question]).astype(np.int32)
            rows.append(Row(prompt, int(rng.integers(1, 65))))
    if arrange == "interleaved":
        rows = [row for position in range(rows_per_group) for row in rows[position::rows_per_group]]
    elif arrange == "shuffled":
        rows = [rows[i] for i in rng.permutation(len(rows))]
    return rows


def long_tail_rows(rng, num_rows, scale=1.0, cap=None):
    """95 in 100 answers lognormal around 100 tokens, the others uniform over 1,000 to 4,000; prompts of 10 to 60."""
    rows = []
    for _ in range(num_rows):
        is_long = rng.random() < 0.05
        length = rng.uniform(1000, 4000) if is_long else min(rng.lognormal(np.log(100), 0.6), 900)
        prompt = rng.integers(10, 30_000, rng.integers(10, 61)).astype(np.int32)
        rows.append(Row(prompt, max(1, int(length * scale)), cap))
    return rows
