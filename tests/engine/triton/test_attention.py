"""Paged attention in Triton, run by its interpreter, against a naive float64 twin and against the reference.

The interpreter's bfloat16 products are wrong, so that dtype is for `make gpu-check`.
"""

from dataclasses import replace

import pytest
import torch

from cbgen.engine.attention.base import AttentionCall, AttentionMetadata
from cbgen.engine.attention.reference import paged_attention
from cbgen.engine.triton.attention import PagedAttention
from cbgen.engine.triton.decode import split_count, split_length
from cbgen.engine.triton.extend import num_query_blocks
from cbgen.engine.triton.tables import DECODE, EXTEND, DecodeConfig, ExtendConfig, decode_config, extend_config
from tests.engine.native.paged_case import make_case, naive_attention

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
SMALL = {"decode": DecodeConfig(16, 16, 4, 2), "extend": ExtendConfig(16, 16, 4, 2)}  # many tiles in a short context
WHOLE = PagedAttention((9, 0), 1, **SMALL)
SPLIT = PagedAttention((9, 0), 10_000, **SMALL)  # so many multiprocessors that every decode is split
ATTENTIONS = {
    "whole": WHOLE,
    "split": SPLIT,
    "tables": PagedAttention((9, 0), 1),
    "default tables, split": PagedAttention((12, 0), 10_000),
}
RATIOS = [(1, 1), (2, 1), (3, 1), (4, 1), (7, 1), (8, 1), (12, 1), (2, 2), (6, 2), (9, 3), (20, 1)]
DIMS = [16, 32, 64, 80, 96, 128, 192, 256]


def run(case, attention, max_context_len=None):
    """The bound of the lengths as tight as it may be, unless another is asked for."""
    bound = int(case.context_lens.max()) if max_context_len is None else max_context_len
    return attention(**vars(case), max_context_len=bound)


def assert_close(case, output):
    assert output.dtype == case.query.dtype
    assert output.is_contiguous()
    error = (output.double() - naive_attention(case)).abs().max().item()
    assert error < TOLERANCE[case.query.dtype]  # false for NaN, too


def picker(seed):
    generator = torch.Generator().manual_seed(seed)
    return generator, lambda choices: choices[int(torch.randint(len(choices), (1,), generator=generator))]


def random_case(seed, dtype, **options):
    """Some decodes, some chunks of prompts, of any shape that a model may have."""
    generator, pick = picker(seed)
    num_decodes, num_chunks = pick([(2, 0), (0, 2), (1, 1), (2, 1)])
    lengths = [pick(range(1, 100)) for _ in range(num_decodes)] + [pick(range(1, 40)) for _ in range(num_chunks)]
    chunks = [pick([1, (length + 1) // 2, length]) for length in lengths[num_decodes:]]
    dim = pick(DIMS)
    drawn = {
        "heads": pick(RATIOS),
        "dims": (dim, pick([dim, dim, dim, *DIMS])),
        "block_size": pick([16, 16, 32]),
        "window": pick([None, None, 1, 15, 33, 64, 1000]),
        "softcap": pick([None, None, 2.0]),
        "sinks": pick([False, False, True]),
    }
    return make_case(generator, lengths, chunks, dtype=dtype, **(drawn | options))


def mixed_case(seed, dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(seed)
    return make_case(generator, [5, 1, 33, 77, 16, 31], [16, 7], dtype=dtype, **({"heads": (3, 1)} | options))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("seed", range(120))
def test_random_problems(seed, dtype):
    case = random_case(seed, dtype)
    assert_close(case, run(case, list(ATTENTIONS.values())[seed % 4]))


@pytest.mark.parametrize("attention", ["whole", "split"])
@pytest.mark.parametrize("ratio", RATIOS, ids=str)
def test_any_ratio_of_heads(ratio, attention):
    case = random_case(1000 + sum(ratio), torch.float32, heads=ratio, dims=(16, 16), block_size=16)
    assert_close(case, run(case, ATTENTIONS[attention]))


@pytest.mark.parametrize("attention", ["split", "tables"])
@pytest.mark.parametrize("dim", DIMS)
def test_any_head_size(dim, attention):
    for dtype in TOLERANCE:
        case = mixed_case(dim, dtype, heads=(3, 1), dims=(dim, dim))
        assert_close(case, run(case, ATTENTIONS[attention]))


@pytest.mark.parametrize("attention", ["whole", "split"])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 32, 33, 60])
def test_windows_at_the_edges_of_tiles_and_splits(window, attention):
    for options in ({}, {"sinks": True}):
        case = mixed_case(window, window=window, heads=(2, 1), dims=(16, 16), **options)
        assert_close(case, run(case, ATTENTIONS[attention]))


@pytest.mark.parametrize("computed", [0, 1, 13, 14, 15, 16, 17, 30, 31, 32])
def test_chunks_that_begin_at_the_edges_of_tiles(computed):
    """A tile that only some of a block's tokens see, by one position or all but one."""
    for count in (1, 2, 6, 17):
        generator = torch.Generator().manual_seed(computed)
        case = make_case(generator, [computed + count], [count], heads=(3, 1), dims=(16, 16))
        assert_close(case, run(case, WHOLE))


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"softcap": 4.0, "sinks": True}], ids=str)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_agrees_with_the_reference_backend(attention, options):
    case = mixed_case(7, **options)
    metadata = AttentionMetadata(
        slot_mapping=torch.empty(0, dtype=torch.int64),
        # The reference reads the columns past a sequence's own blocks, and clears what it finds there.
        block_tables=case.block_tables.clamp(max=len(case.key_cache) - 1),
        context_lens=case.context_lens,
        cu_seqlens_q=case.cu_seqlens_q,
        num_decodes=case.num_decodes,
        max_context_len=int(case.context_lens.max()),
        query_starts=case.cu_seqlens_q.tolist(),
        host_context_lens=case.context_lens.tolist(),
    )
    call = AttentionCall(0, case.scale, case.window, case.softcap, case.sinks)
    caches = (case.key_cache.nan_to_num(1.0), case.value_cache.nan_to_num(1.0))  # before a window it needs numbers
    expected = paged_attention(call, case.query.contiguous(), *caches, metadata)
    torch.testing.assert_close(run(case, ATTENTIONS[attention]), expected, rtol=0, atol=2e-6)


def padded(case, num_empty, num_padding):
    """The case with sequences of no tokens, of whatever length, behind it, and tokens behind them that are no one's."""
    last = case.cu_seqlens_q[-1:]
    query = torch.cat([case.query, torch.full_like(case.query[:1], torch.nan).repeat(num_padding, 1, 1)])
    tables = torch.full((num_empty, case.block_tables.shape[1]), 2**30, dtype=torch.int32)
    return replace(
        case,
        query=query,
        block_tables=torch.cat([case.block_tables, tables]),
        cu_seqlens_q=torch.cat([case.cu_seqlens_q, last.repeat(num_empty)]),
        context_lens=torch.cat([case.context_lens, 7 * torch.arange(num_empty, dtype=torch.int32)]),
    )


@pytest.mark.parametrize("seed", range(12))
def test_a_padded_step_gives_the_same_and_zeros(seed):
    _, pick = picker(seed)
    case = mixed_case(seed, heads=(3, 1), dims=(32, 16), sinks=seed % 2 == 1, window=pick([None, 20]))
    num_tokens, num_padding = len(case.query), pick([0, 1, 5, 16, 40])
    bigger = padded(case, pick([0, 1, 3, 8]), num_padding)
    output = run(bigger, WHOLE)
    assert torch.equal(output[:num_tokens], run(case, WHOLE))
    assert torch.equal(output[num_tokens:], torch.zeros(num_padding, 3, 16))


def test_empty_sequences_between_others():
    case = mixed_case(3, dims=(16, 16))
    expected = run(case, WHOLE)
    at = case.num_decodes + 1  # after the first of the chunks
    bigger = replace(
        case,
        block_tables=torch.cat([case.block_tables[:at], case.block_tables[:2], case.block_tables[at:]]),
        cu_seqlens_q=torch.cat(
            [case.cu_seqlens_q[: at + 1], case.cu_seqlens_q[at].repeat(2), case.cu_seqlens_q[at + 1 :]]
        ),
        context_lens=torch.cat(
            [case.context_lens[:at], torch.tensor([9, 0], dtype=torch.int32), case.context_lens[at:]]
        ),
    )
    assert torch.equal(run(bigger, WHOLE), expected)


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("attention", ["whole", "split"])
def test_a_decode_that_holds_nothing_gives_zeros(attention, options):
    case = mixed_case(4, **options)
    nothing = case.context_lens.clone()
    nothing[2] = 0
    output = run(replace(case, context_lens=nothing), ATTENTIONS[attention])
    expected = run(case, ATTENTIONS[attention])
    expected[2] = 0
    assert torch.equal(output, expected)


def test_padding_without_any_prompt():
    case = make_case(torch.Generator().manual_seed(0), [20, 40], [], heads=(2, 1), dims=(16, 16))
    output = run(padded(case, 0, 5), WHOLE)
    assert torch.equal(output[:2], run(case, WHOLE))
    assert torch.equal(output[2:], torch.zeros(5, 2, 16))


@pytest.mark.parametrize("options", [{}, {"window": 20, "sinks": True}], ids=str)
@pytest.mark.parametrize("num_multiprocessors", [0, 3, 9_999])  # no splits, long ones, short ones
def test_the_same_bits_alone_and_in_company(num_multiprocessors, options):
    """Where the host chooses the same length of a split, as it does for a GPU smaller by as much as the batch is."""
    generator = torch.Generator().manual_seed(50)
    case = make_case(generator, [5, 33, 77, 16, 31], [16, 7], heads=(2, 1), dims=(16, 16), **options)
    together = run(case, PagedAttention((9, 0), num_multiprocessors, **SMALL), 77)
    for index in range(len(case.context_lens)):
        single, own = case.alone(index)
        fewer = PagedAttention((9, 0), num_multiprocessors // case.num_decodes, **SMALL)
        assert torch.equal(run(single, fewer, 77), together[own])


@pytest.mark.parametrize("window", [None, 20, 50])
def test_the_same_however_a_prompt_is_cut(window):
    """To the bit, if tokens keep their places in a block: the interpreter's products are not the same in every row."""
    generator = torch.Generator().manual_seed(0)
    whole = make_case(generator, [90], [90], window=window, heads=(3, 1), dims=(16, 16))
    expected = run(whole, WHOLE)
    for counts, tolerance in (((5, 35, 10, 40), 0), ((1, 33, 2, 16, 38), 1e-6)):  # blocks of 5 tokens, 3 heads each
        start = 0
        for count in counts:
            part = replace(
                whole,
                query=whole.query[start : start + count],
                cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
                context_lens=torch.tensor([start + count], dtype=torch.int32),
            )
            torch.testing.assert_close(run(part, WHOLE), expected[start : start + count], rtol=0, atol=tolerance)
            start += count
        assert start == 90


@pytest.mark.parametrize("bound", [1, 40, 77, 500, 4096])
def test_any_bound_of_the_lengths_gives_the_same(bound):
    """Too high, as when a graph is made for a bucket of lengths; even too low."""
    for options in ({}, {"window": 20}):
        case = mixed_case(5, **options)
        torch.testing.assert_close(run(case, SPLIT, bound), run(case, WHOLE), rtol=0, atol=2e-6)


def test_a_chunk_of_one_token_agrees_with_a_decode():
    case = make_case(torch.Generator().manual_seed(11), [1, 40, 77], [], heads=(6, 2))
    for attention in (WHOLE, SPLIT):
        expected = run(replace(case, num_decodes=0), attention)
        torch.testing.assert_close(run(case, attention), expected, rtol=0, atol=2e-6)


def test_large_logits_do_not_overflow():
    """Logits of thousands, rounded to float32, their exponentials off by some 1e-4; and a cap far below."""
    for case in (mixed_case(12, scale=40.0), mixed_case(12, scale=100.0, softcap=2.0)):
        for attention in (WHOLE, SPLIT):
            torch.testing.assert_close(run(case, attention).double(), naive_attention(case), rtol=0, atol=2e-3)


@pytest.mark.parametrize("attention", ["whole", "split"])
def test_a_broken_sequence_harms_no_other(attention):
    """NaN in what a sequence has written makes its own result NaN, and nobody else's."""
    case = mixed_case(13)
    expected = run(case, ATTENTIONS[attention])
    for index in (0, case.num_decodes):
        held = int(case.context_lens[index])
        key_cache = case.key_cache.clone()
        key_cache[case.block_tables[index, (held - 1) // 16], :, (held - 1) % 16] = torch.nan
        output = run(replace(case, key_cache=key_cache), ATTENTIONS[attention])
        own = case.alone(index)[1]
        assert output[own][-1].isnan().all()
        others = torch.ones(len(output), dtype=torch.bool)
        others[own] = False
        assert torch.equal(output[others], expected[others])


def test_nothing_to_do():
    case = mixed_case(0)
    for num_seqs in (0, 3):  # no sequence at all, or chunks of no tokens
        empty = replace(
            case,
            query=case.query[:0],
            block_tables=case.block_tables[:num_seqs],
            cu_seqlens_q=torch.zeros(num_seqs + 1, dtype=torch.int32),
            context_lens=case.context_lens[:num_seqs],
            num_decodes=0,
        )
        assert run(empty, WHOLE, 1).shape == (0, 3, 64)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda c: replace(c, query=c.query.double()),
        lambda c: replace(c, key_cache=c.key_cache.bfloat16()),
        lambda c: replace(c, key_cache=c.key_cache[..., :32].contiguous()),
        lambda c: replace(c, value_cache=c.value_cache.transpose(1, 2).contiguous()),
        lambda c: replace(c, value_cache=c.value_cache[..., ::2]),
        lambda c: replace(c, key_cache=c.key_cache.repeat(1, 2, 1, 1), value_cache=c.value_cache.repeat(1, 2, 1, 1)),
        lambda c: replace(c, query=c.query.transpose(1, 2).contiguous().transpose(1, 2)),
        lambda c: replace(c, block_tables=c.block_tables.long()),
        lambda c: replace(c, block_tables=c.block_tables[:2]),
        lambda c: replace(c, context_lens=c.context_lens.long()),
        lambda c: replace(c, cu_seqlens_q=c.cu_seqlens_q[:-1]),
        lambda c: replace(c, value_cache=torch.zeros(len(c.value_cache), 1, 16, 257)),
    ],
)
def test_refuses_what_it_cannot_read(wrong):
    with pytest.raises(ValueError, match=r"attention over|do not fit|contiguous|int32|different steps|more than"):
        run(wrong(mixed_case(0)), WHOLE)


def test_length_of_splits():
    """Against a search: the longest power of two that still gives every multiprocessor two programs."""
    for programs in (1, 2, 8, 63, 64, 131, 132, 263, 264, 2048):
        for longest in (1, 64, 65, 128, 1000, 4096, 100_000):
            length = split_length(programs, longest, 132, 64)
            if programs >= 264 or longest <= 64:
                assert length == 0
                continue
            enough = [2**n for n in range(6, 20) if programs * -(-longest // 2**n) >= 264]
            assert length == max(enough, default=64)


def test_number_of_splits():
    """Against a count, wherever a row's window may lie: none is missing, and none is there for nothing."""
    assert split_count(1000, 20, 0) == 1
    for length in (1, 2, 4, 16):
        for longest in range(1, 40):
            for window in (0, 1, 2, 3, 4, 5, 15, 16, 17, 18, 50):
                spans = [(max(held - window, 0) if window else 0, held - 1) for held in range(1, longest + 1)]
                needed = max(last // length - first // length + 1 for first, last in spans)
                count = split_count(longest, window, length)
                assert needed <= count
                assert count == needed or longest < window + length  # a window too long to lie everywhere


def test_query_blocks_are_enough():
    """Every cut of a few tokens into sequences and a rest, block by block as the kernel numbers them."""
    for block_tokens in (1, 3, 4):
        for first in range(7):
            for second in range(7):
                for rest in range(5):
                    starts = [0, first, first + second]  # of two sequences and the padding
                    stops = [first, first + second, first + second + rest]
                    total = num_query_blocks(stops[-1], 2, block_tokens)
                    begins = [start // block_tokens + index for index, start in enumerate(starts)] + [total]
                    for index in range(3):
                        assert (begins[index + 1] - begins[index]) * block_tokens >= stops[index] - starts[index]


def test_tables_have_an_entry_for_every_head():
    for capability, name in (((8, 0), "a100"), ((9, 0), "hopper"), ((8, 9), "default"), ((10, 0), "default")):
        for itemsize in (2, 4):
            for dim, width in ((16, 64), (64, 64), (65, 128), (128, 128), (192, 256), (256, 256)):
                assert decode_config(capability, dim, itemsize) == DECODE[name][itemsize][width]
                assert extend_config(capability, dim, itemsize) == EXTEND[name][itemsize][width]
