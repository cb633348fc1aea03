"""Paged attention on the CPU against a naive float64 twin, in both builds of the kernel."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from cbgen.engine.attention.base import AttentionCall, AttentionMetadata
from cbgen.engine.attention.reference import paged_attention
from cbgen.engine.native.attention import PagedAttention
from cbgen.engine.native.library import open_library
from tests.engine.native.paged_case import make_case, naive_attention

# Positions held, decodes first; both sides of block (16, 32), key tile (64) and split (512) edges.
DECODES = [1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 511, 512, 513, 700, 1025]
PREFILLS = [(1, 1), (5, 5), (64, 64), (65, 65), (40, 7), (130, 33), (600, 70)]  # (held, of those in this step)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.002}
MODELS = {
    "smollm2": {"heads": (9, 3), "dims": (64, 64)},
    "qwen3": {"heads": (16, 8), "dims": (128, 128)},
    "one-kv-head": {"heads": (8, 1), "dims": (80, 80), "block_size": 32},
    "seven": {"heads": (7, 1), "dims": (256, 256)},
    "multi-head": {"heads": (32, 32), "dims": (64, 64)},
    "odd": {"heads": (5, 1), "dims": (65, 33), "block_size": 24, "scale": 0.3},
    "wide-group": {"heads": (71, 1), "dims": (64, 64)},
    "keys-wider": {"heads": (4, 2), "dims": (192, 128), "block_size": 8},
}
OPTIONS = {
    "window": {"window": 50},
    "wide-window": {"window": 600},
    "window-of-one": {"window": 1},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "all": {"window": 77, "softcap": 5.0, "sinks": True, "block_size": 32},
}


@pytest.fixture(scope="module", params=["this CPU", "plain"])
def attention(request):
    return PagedAttention(open_library(lambda text: None, plain=request.param == "plain"))


def mixed_case(seed, dtype=torch.float32, **options):
    """Some of the lengths above, in another order for each seed."""
    generator = torch.Generator().manual_seed(seed)
    decodes = [DECODES[i] for i in torch.randperm(len(DECODES), generator=generator)[:8]]
    prefills = [PREFILLS[i] for i in torch.randperm(len(PREFILLS), generator=generator)[:4]]
    lengths = decodes + [held for held, _ in prefills]
    return make_case(generator, lengths, [count for _, count in prefills], dtype=dtype, **options)


def assert_close(case, output):
    assert output.dtype == case.query.dtype
    assert output.is_contiguous()
    error = (output.double() - naive_attention(case)).abs().max().item()
    assert error < TOLERANCE[case.query.dtype]  # false for NaN, too


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_shapes_of_models(attention, model, dtype):
    case = mixed_case(sorted(MODELS).index(model), dtype, **MODELS[model])
    assert_close(case, case.run(attention))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(attention, option, dtype):
    case = mixed_case(sorted(OPTIONS).index(option), dtype, **OPTIONS[option])
    assert_close(case, case.run(attention))


@pytest.mark.parametrize("seed", range(20))
def test_random_problems(attention, seed):
    generator = torch.Generator().manual_seed(100 + seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    lengths = [pick(*range(1, 300)) for _ in range(6)]
    chunks = [pick(*range(1, length + 1)) for length in lengths[3:]]
    case = make_case(
        generator,
        lengths,
        chunks,
        heads=pick((1, 1), (2, 1), (3, 1), (4, 2), (6, 1), (12, 4), (10, 2)),
        dims=(pick(*range(1, 257)), pick(*range(1, 257))),
        block_size=pick(1, 3, 16, 32, 48),
        window=pick(None, None, 1, 30, 64, 1000),
        softcap=pick(None, None, 2.0),
        sinks=pick(False, True),
    )
    assert_close(case, case.run(attention))


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 4.0, "sinks": True}], ids=str)
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
    torch.testing.assert_close(case.run(attention), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", ["smollm2", "qwen3"])
def test_bfloat16_errs_no_more_than_torch(attention, model):
    """Root mean square error against float64, for decodes and for prompts, at most that of torch's own bfloat16."""
    heads, dims = MODELS[model]["heads"], MODELS[model]["dims"]
    generator = torch.Generator().manual_seed(3)
    for lengths, chunks in (([300, 700, 1000], []), ([300], [300])):
        case = make_case(generator, lengths, chunks, heads=heads, dims=dims, dtype=torch.bfloat16)
        ours, theirs = [], []
        for index, held in enumerate(lengths):
            single, own = case.alone(index)
            exact = naive_attention(single)
            ours.append((case.run(attention)[own].double() - exact).flatten())
            positions = torch.arange(held)
            block, offset = case.block_tables[index, positions // 16].long(), positions % 16
            key, value = (cache[block, :, offset].transpose(0, 1)[None] for cache in (case.key_cache, case.value_cache))
            query = single.query.transpose(0, 1)[None]  # [1, Hq, Tq, D]
            output = F.scaled_dot_product_attention(
                query, key, value, is_causal=bool(chunks), scale=case.scale, enable_gqa=True
            )
            theirs.append((output[0].transpose(0, 1).double() - exact).flatten())
        assert torch.cat(ours).norm() <= 1.1 * torch.cat(theirs).norm()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", [{}, {"heads": (16, 8), "dims": (128, 128), "window": 90}], ids=str)
def test_the_same_bits_alone_and_with_any_number_of_threads(attention, options, dtype):
    for seed in range(3):
        case = mixed_case(50 + seed, dtype, **options)
        together = case.run(attention, num_threads=1)
        for num_threads in (2, 3):
            assert torch.equal(case.run(attention, num_threads), together)
        for index in range(len(case.context_lens)):
            single, own = case.alone(index)
            assert torch.equal(single.run(attention, num_threads=1 + index % 2), together[own])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_same_bits_however_a_prompt_is_cut(attention, dtype):
    for seed, window in enumerate((None, 20, 100)):
        generator = torch.Generator().manual_seed(seed)
        whole = make_case(generator, [300], [300], dtype=dtype, window=window)
        expected = whole.run(attention)
        start = 0
        for count in (1, 63, 2, 100, 134):
            part = replace(
                whole,
                query=whole.query[start : start + count],
                cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
                context_lens=torch.tensor([start + count], dtype=torch.int32),
            )
            assert torch.equal(part.run(attention), expected[start : start + count])
            start += count
        assert start == 300


def test_a_chunk_of_one_token_agrees_with_a_decode(attention):
    case = mixed_case(11)
    case = replace(
        case,
        query=case.query[: case.num_decodes],
        cu_seqlens_q=case.cu_seqlens_q[: case.num_decodes + 1],
        context_lens=case.context_lens[: case.num_decodes],
    )
    torch.testing.assert_close(replace(case, num_decodes=0).run(attention), case.run(attention), rtol=0, atol=2e-6)


def test_large_logits_do_not_overflow(attention):
    """Logits of thousands, rounded to float32, their exponentials off by some 1e-4; and a cap far below."""
    for case in (mixed_case(12, scale=40.0), mixed_case(12, scale=100.0, softcap=2.0)):
        torch.testing.assert_close(case.run(attention).double(), naive_attention(case), rtol=0, atol=2e-3)


def test_a_broken_sequence_harms_no_other(attention):
    """NaN in what a sequence has written makes its own result NaN, and nobody else's."""
    case = mixed_case(13)
    expected = case.run(attention)
    for index in (0, case.num_decodes):
        held = int(case.context_lens[index])
        key_cache = case.key_cache.clone()
        key_cache[case.block_tables[index, (held - 1) // 16], :, (held - 1) % 16] = torch.nan
        output = replace(case, key_cache=key_cache).run(attention)
        own = case.alone(index)[1]
        assert output[own][-1].isnan().all()
        others = torch.ones(len(output), dtype=torch.bool)
        others[own] = False
        assert torch.equal(output[others], expected[others])


def test_nothing_to_do(attention):
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
        assert empty.run(attention).shape == (0, 9, 64)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda c: replace(c, query=c.query.double()),
        lambda c: replace(c, key_cache=c.key_cache.bfloat16()),
        lambda c: replace(c, key_cache=c.key_cache[..., :32].contiguous()),
        lambda c: replace(c, value_cache=c.value_cache.transpose(1, 2).contiguous()),
        lambda c: replace(c, value_cache=c.value_cache[..., ::2]),
        lambda c: replace(c, query=c.query[:, :8]),
        lambda c: replace(c, query=c.query.transpose(1, 2).contiguous().transpose(1, 2)),
        lambda c: replace(c, block_tables=c.block_tables.long()),
        lambda c: replace(c, block_tables=c.block_tables[:2]),
        lambda c: replace(c, context_lens=c.context_lens.long()),
        lambda c: replace(c, cu_seqlens_q=c.cu_seqlens_q[:-1]),
        lambda c: replace(c, value_cache=torch.zeros(len(c.value_cache), 3, 16, 257)),
    ],
)
def test_refuses_what_it_cannot_read(attention, wrong):
    with pytest.raises(ValueError, match=r"attention over|do not fit|contiguous|int32|different steps|more than"):
        wrong(mixed_case(0)).run(attention)
