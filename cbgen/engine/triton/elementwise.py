"""The small operators of a layer on CUDA, one launch each: tensors in, tensors out, nothing read by the host.

Shapes and meaning as in `cbgen.engine.operators.base`. Tensors are float32, bfloat16 or float16, their last dimensions
contiguous; what is computed is float32 and rounded once, where it is stored. Grids follow from shapes alone, so that
CUDA graphs can hold the launches. A program does one row or a part of one by itself: a row's result does not depend on
its company. Fusing rotation with the write to the cache is an idea of FlashInfer and vLLM.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_NORM_SIZE = 1 << 16  # elements of a row that one program holds
MAX_HEAD_DIM = 1024
_ACTIVATION_TILE = 1024
_TURNED = 1024  # values of a token that one program of `rope_and_store` rotates, about


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    """See `Operators.rms_norm`; rows of up to MAX_NORM_SIZE."""
    num_rows, size = x.shape
    y = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        _rms_norm_kernel[(num_rows,)](
            x, x if residual is None else residual, weight, y, x.stride(0),
            0 if residual is None else residual.stride(0), size, eps,
            HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    return y


def activation_mul(gate_up: Tensor, is_gelu: bool) -> Tensor:
    """See `Operators.activation_mul`."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        _activation_mul_kernel[(num_rows, -(-size // _ACTIVATION_TILE))](
            gate_up, y, gate_up.stride(0), size, IS_GELU=is_gelu, TILE=_ACTIVATION_TILE, num_warps=4
        )
    return y


def rope_and_store(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """See `Operators.rope_and_store`; `norms` are the weights of queries and keys, and the epsilon."""
    num_tokens = qkv.shape[0]
    if not num_tokens:
        return
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    half = cos.shape[1] // 2
    heads_per_program = max(_TURNED // triton.next_power_of_2(head_dim), 1)
    query_norm, key_norm, eps = (qkv, qkv, 0.0) if norms is None else norms
    _rope_and_store_kernel[(num_tokens, -(-(num_heads + 2 * num_kv_heads) // heads_per_program))](
        qkv, cos, sin, query_norm, key_norm, key_cache, value_cache, slot_mapping,
        qkv.stride(0), cos.stride(0), sin.stride(0), eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, HALF=half,
        HAS_NORMS=norms is not None, HEADS_PER_PROGRAM=heads_per_program,
        HALF_PAD=triton.next_power_of_2(half), REST_PAD=triton.next_power_of_2(head_dim - 2 * half), num_warps=4,
    )  # fmt: skip


def store(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `Operators.store`."""
    num_tokens, num_kv_heads, key_dim = key.shape
    if num_tokens:
        value_dim = value.shape[2]
        _store_kernel[(num_tokens, num_kv_heads)](
            key, value, key_cache, value_cache, slot_mapping,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            NUM_KV_HEADS=num_kv_heads, BLOCK_SIZE=key_cache.shape[2], KEY_DIM=key_dim, VALUE_DIM=value_dim,
            PAD=triton.next_power_of_2(max(key_dim, value_dim)), num_warps=1,
        )  # fmt: skip


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [T, size]
    residual_ptr,  # [T, size], changed in place; not used without HAS_RESIDUAL
    weight_ptr,  # [size] float32
    y_ptr,  # [T, size], contiguous
    x_stride,
    residual_stride,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two from `size` up
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < size
    x = tl.load(x_ptr + row * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + row * residual_stride + columns
        grown = (tl.load(residual_ptrs, mask=is_inside, other=0.0).to(tl.float32) + x).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptrs, grown, mask=is_inside)
        x = grown.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * size + columns, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def _activation_mul_kernel(
    x_ptr,  # [T, 2 size], gate and up
    y_ptr,  # [T, size], contiguous
    x_stride,
    size,
    IS_GELU: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_inside = columns < size
    gate = tl.load(x_ptr + row * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + size + columns, mask=is_inside, other=0.0).to(tl.float32)
    exponent = gate
    if IS_GELU:
        # x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), which stays exact where it is small
        exponent = 2 * gate * (0.7978845608028654 + 0.7978845608028654 * 0.044715 * gate * gate)
    y = gate / (1.0 + tl.exp(-exponent)) * up
    tl.store(y_ptr + row * size + columns, y.to(y_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def _rope_and_store_kernel(
    qkv_ptr,  # [T, (NUM_HEADS + 2 NUM_KV_HEADS) * HEAD_DIM]
    cos_ptr,  # [T, 2 HALF]
    sin_ptr,
    query_norm_ptr,  # [HEAD_DIM] float32; not used without HAS_NORMS
    key_norm_ptr,
    key_cache_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,
    slot_mapping_ptr,  # [T] int64
    qkv_stride,
    cos_stride,
    sin_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # of the values that are rotated
    HAS_NORMS: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    HALF_PAD: tl.constexpr,  # powers of two
    REST_PAD: tl.constexpr,
):
    """A program does some heads of a token, whatever they are. Each is read as three parts: the two halves of what is
    rotated, and the rest."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    is_query, is_value = heads < NUM_HEADS, heads >= NUM_HEADS + NUM_KV_HEADS
    is_head = heads < NUM_HEADS + 2 * NUM_KV_HEADS
    columns = tl.arange(0, HALF_PAD)
    is_half = is_head[:, None] & (columns < HALF)[None, :]
    sources = qkv_ptr + token * qkv_stride + heads[:, None] * HEAD_DIM + columns[None, :]
    first = tl.load(sources, mask=is_half, other=0.0).to(tl.float32)  # [heads, HALF]
    second = tl.load(sources + HALF, mask=is_half, other=0.0).to(tl.float32)

    if REST_PAD > 0:
        rest_columns = tl.arange(0, REST_PAD)
        is_rest = is_head[:, None] & (rest_columns < HEAD_DIM - 2 * HALF)[None, :]
        rest_sources = qkv_ptr + token * qkv_stride + heads[:, None] * HEAD_DIM + 2 * HALF + rest_columns[None, :]
        rest = tl.load(rest_sources, mask=is_rest, other=0.0).to(tl.float32)
    if HAS_NORMS:
        squares = tl.sum(first * first + second * second, axis=1)
        if REST_PAD > 0:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.where(is_value, 1.0, tl.rsqrt(squares / HEAD_DIM + eps))[:, None]
        first *= scale * _norm_weights(query_norm_ptr, key_norm_ptr, columns, HALF, is_query, is_value)
        second *= scale * _norm_weights(query_norm_ptr + HALF, key_norm_ptr + HALF, columns, HALF, is_query, is_value)
        if REST_PAD > 0:
            weights = _norm_weights(
                query_norm_ptr + 2 * HALF,
                key_norm_ptr + 2 * HALF,
                rest_columns,
                HEAD_DIM - 2 * HALF,
                is_query,
                is_value,
            )
            rest *= scale * weights

    cos = tl.load(cos_ptr + token * cos_stride + columns, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * sin_stride + columns, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    turned_first = tl.where(is_value[:, None], first, first * cos - second * sin)
    turned_second = tl.where(is_value[:, None], second, second * cos + first * sin)
    slot = tl.load(slot_mapping_ptr + token)
    kv_heads = tl.where(is_value, heads - NUM_HEADS - NUM_KV_HEADS, heads - NUM_HEADS)
    cached = ((slot // BLOCK_SIZE * NUM_KV_HEADS + kv_heads) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
    offsets = cached[:, None] + columns[None, :]
    is_key = (is_query | is_value) == 0
    tl.debug_barrier()  # queries are changed in place: where two threads hold the same value, both have read it
    _put(turned_first, sources, key_cache_ptr, value_cache_ptr, offsets, is_half, is_query, is_key, is_value)
    _put(
        turned_second,
        sources + HALF,
        key_cache_ptr,
        value_cache_ptr,
        offsets + HALF,
        is_half,
        is_query,
        is_key,
        is_value,
    )
    if REST_PAD > 0:
        rest_offsets = cached[:, None] + 2 * HALF + rest_columns[None, :]
        _put(rest, rest_sources, key_cache_ptr, value_cache_ptr, rest_offsets, is_rest, is_query, is_key, is_value)


@triton.jit
def _put(x, query_ptrs, key_ptr, value_ptr, offsets, is_inside, is_query, is_key, is_value):
    """Store parts of heads [heads, columns] where they go: queries where they were, keys and values to the caches."""
    x = x.to(key_ptr.dtype.element_ty)
    tl.store(query_ptrs, x, mask=is_inside & is_query[:, None])
    tl.store(key_ptr + offsets, x, mask=is_inside & is_key[:, None])
    tl.store(value_ptr + offsets, x, mask=is_inside & is_value[:, None])


@triton.jit
def _norm_weights(query_norm_ptr, key_norm_ptr, columns, num_columns, is_query, is_value):
    """[heads, columns]: each head's weights, 1 for values."""
    is_inside = columns < num_columns
    query_weights = tl.load(query_norm_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)[None, :]
    key_weights = tl.load(key_norm_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_value[:, None], 1.0, tl.where(is_query[:, None], query_weights, key_weights))


@triton.jit
def _store_kernel(
    key_ptr,  # [T, NUM_KV_HEADS, KEY_DIM], strided
    value_ptr,  # [T, NUM_KV_HEADS, VALUE_DIM], strided
    key_cache_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, KEY_DIM]
    value_cache_ptr,
    slot_mapping_ptr,  # [T] int64
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAD: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    target = (slot // BLOCK_SIZE * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    columns = tl.arange(0, PAD)
    keys = tl.load(key_ptr + token * key_token_stride + head * key_head_stride + columns, mask=columns < KEY_DIM)
    tl.store(key_cache_ptr + target * KEY_DIM + columns, keys, mask=columns < KEY_DIM)
    values = tl.load(
        value_ptr + token * value_token_stride + head * value_head_stride + columns, mask=columns < VALUE_DIM
    )
    tl.store(value_cache_ptr + target * VALUE_DIM + columns, values, mask=columns < VALUE_DIM)
