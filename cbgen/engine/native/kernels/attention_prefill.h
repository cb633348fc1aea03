// Prefill: a tile of consecutive query tokens of one sequence, times the G query heads of one KV head, against keys and
// values in tiles of 64 positions with a running softmax (Milakov and Gimelshein, arXiv 1805.02867; as a blocked
// kernel: FlashAttention, arXiv 2205.14135). Both products are small matrix products over packed operands.
//
// Key tiles lie at fixed positions and a masked key adds exactly nothing, so a token's result depends neither on its
// company nor on how its prompt was cut into chunks.
#pragma once

#include "attention_decode.h"

namespace cbgen {

constexpr int kKeyTile = 64;  // positions
constexpr int kRowsWanted = 96;  // query tokens x heads of a tile, about

// The operands of the small matrix products are 32-bit words: one float, or two bfloat16 for the pairwise dot product.
template <class T>
struct Words {
    using Word = float;
    static constexpr int per_word = 1;
    static Vec add(Vec sum, const float* b, float a) { return fma(Vec(a), load(b), sum); }
};
#ifdef CBGEN_BF16_DOT
template <>
struct Words<Bf16> {
    using Word = uint32_t;
    static constexpr int per_word = 2;
    static Vec add(Vec sum, const uint32_t* b, uint32_t a) {
        return _mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_loadu_si512(b), (__m512bh)_mm512_set1_epi32(int(a)));
    }
};
#endif
template <class T>
using Word = typename Words<T>::Word;

// -- c[rows, columns] += a[rows, depth] x b[depth, columns] -----------------------------------------------------------

#ifdef CBGEN_AVX512

constexpr int kBlockRows = 6, kBlockVectors = 4;  // 24 sums, 4 columns and one factor fill the 32 registers

template <class T, int R, int C>
inline void multiply_block(const Word<T>* a, int a_stride, const Word<T>* b, int b_stride, float* c, int c_stride,
                           int depth) {
    Vec kept[R][C];
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < C; ++j) kept[r][j] = load(c + r * c_stride + j * kWidth);
    for (int k = 0; k < depth; ++k)
        for (int r = 0; r < R; ++r) {
            const Word<T> factor = a[r * a_stride + k];
            for (int j = 0; j < C; ++j) kept[r][j] = Words<T>::add(kept[r][j], b + k * b_stride + j * kWidth, factor);
        }
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < C; ++j) store(c + r * c_stride + j * kWidth, kept[r][j]);
}

#else

constexpr int kBlockRows = 6, kBlockVectors = 1;  // 12 of the 16 registers of eight floats

template <class T, int R, int C>
inline void multiply_block(const float* a, int a_stride, const float* b, int b_stride, float* c, int c_stride,
                           int depth) {
    static_assert(C == 1, "more would not fit into the registers of most CPUs");
    Lanes kept[R][kPieces], column[kPieces];
    for (int r = 0; r < R; ++r) sixteen_of(c + r * c_stride, kWidth, kept[r]);
    for (int k = 0; k < depth; ++k) {
        sixteen_of(b + k * b_stride, kWidth, column);
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < kPieces; ++i) kept[r][i] += a[r * a_stride + k] * column[i];
    }
    for (int r = 0; r < R; ++r) std::memcpy(c + r * c_stride, kept[r], sizeof(kept[r]));
}

#endif

template <class T, int C>
inline void multiply_columns(const Word<T>* a, int a_stride, const Word<T>* b, int b_stride, float* c, int c_stride,
                             int rows, int depth) {
    int r = 0;
    for (; r + kBlockRows <= rows; r += kBlockRows)
        multiply_block<T, kBlockRows, C>(a + r * a_stride, a_stride, b, b_stride, c + r * c_stride, c_stride, depth);
    for (; r < rows; ++r)
        multiply_block<T, 1, C>(a + r * a_stride, a_stride, b, b_stride, c + r * c_stride, c_stride, depth);
}

// `columns` is a multiple of 16.
template <class T>
inline void multiply(const Word<T>* a, int a_stride, const Word<T>* b, int b_stride, float* c, int c_stride, int rows,
                     int columns, int depth) {
    constexpr int wide = kBlockVectors * kWidth;
    int j = 0;
    for (; j + wide <= columns; j += wide)
        multiply_columns<T, kBlockVectors>(a, a_stride, b + j, b_stride, c + j, c_stride, rows, depth);
    for (; j < columns; j += kWidth)
        multiply_columns<T, 1>(a, a_stride, b + j, b_stride, c + j, c_stride, rows, depth);
}

// -- packing ----------------------------------------------------------------------------------------------------------

// A query [D] to words, the last one filled with zero.
template <class T>
inline void pack_query(const T* from, float* to, int dim) {
    load_query(from, to, dim);
}
template <class T>
inline void pack_query(const T* from, uint32_t* to, int dim) {
    to[(dim - 1) / 2] = 0;
    std::memcpy(to, from, dim * sizeof(T));
}

#ifdef CBGEN_AVX512

inline __m512i key_words(const float* p, int count) { return _mm512_castps_si512(load_first(p, count).v); }
inline __m512i key_words(const F16* p, int count) { return _mm512_castps_si512(load_first(p, count).v); }
#ifdef CBGEN_BF16_DOT
inline __m512i key_words(const Bf16* p, int count) {
    return _mm512_maskz_loadu_epi16(count >= 32 ? ~0u : (1u << count) - 1u, p);
}
#else
inline __m512i key_words(const Bf16* p, int count) { return _mm512_castps_si512(load_first(p, count).v); }
#endif

// Transpose 16 rows of 16 words, in place: pairs, fours, then 128-bit lanes twice.
inline void transpose(__m512i* rows) {
    __m512i t[kTile];
    for (int i = 0; i < kTile; i += 2) {
        t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < kTile; i += 4) {  // rows[i + k]: word k of each lane, of four rows
        rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int k = 0; k < 4; ++k) {
        const __m512i even_a = _mm512_shuffle_i32x4(rows[k], rows[4 + k], 0x88);
        const __m512i odd_a = _mm512_shuffle_i32x4(rows[k], rows[4 + k], 0xdd);
        const __m512i even_b = _mm512_shuffle_i32x4(rows[8 + k], rows[12 + k], 0x88);
        const __m512i odd_b = _mm512_shuffle_i32x4(rows[8 + k], rows[12 + k], 0xdd);
        t[k] = _mm512_shuffle_i32x4(even_a, even_b, 0x88);
        t[4 + k] = _mm512_shuffle_i32x4(odd_a, odd_b, 0x88);
        t[8 + k] = _mm512_shuffle_i32x4(even_a, even_b, 0xdd);
        t[12 + k] = _mm512_shuffle_i32x4(odd_a, odd_b, 0xdd);
    }
    for (int i = 0; i < kTile; ++i) rows[i] = t[i];
}

// Sixteen keys [16, D] to columns: to[word * kKeyTile + key].
template <class T>
inline void pack_keys(const T* keys, Word<T>* to, int dim) {
    constexpr int per_word = Words<T>::per_word, step = kTile * per_word;
    for (int d = 0; d < dim; d += step) {
        const int count = std::min(step, dim - d), words = (count + per_word - 1) / per_word;
        __m512i rows[kTile];
        for (int i = 0; i < kTile; ++i) rows[i] = key_words(keys + i * dim + d, count);
        transpose(rows);
        for (int w = 0; w < words; ++w) _mm512_storeu_si512(to + (d / per_word + w) * kKeyTile, rows[w]);
    }
}

#else

template <class T>
inline void pack_keys(const T* keys, float* to, int dim) {
    for (int i = 0; i < kTile; ++i)
        for (int d = 0; d < dim; ++d) to[d * kKeyTile + i] = to_float(keys[i * dim + d]);
}

#endif

// Sixteen values [16, Dv] to rows of words, [16 / per_word, stride].
template <class T>
inline void pack_values(const T* values, float* to, int dim, int stride) {
    for (int i = 0; i < kTile; ++i)
        for (int d = 0; d < dim; d += kWidth)
            store(to + i * stride + d, load_first(values + i * dim + d, std::min(kWidth, dim - d)));
}
#ifdef CBGEN_BF16_DOT
inline void pack_values(const Bf16* values, uint32_t* to, int dim, int stride) {
    for (int i = 0; i < kTile; i += 2)
        for (int d = 0; d < dim; d += kWidth) {
            const __mmask16 mask = first(std::min(kWidth, dim - d));
            const __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, values + i * dim + d));
            const __m512i odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, values + (i + 1) * dim + d));
            _mm512_storeu_si512(to + i / 2 * stride + d, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        }
}
#endif

// -- a work item ------------------------------------------------------------------------------------------------------

// Query tokens per tile: by the shape of the model alone.
inline int tokens_per_tile(int group) { return std::max(1, kRowsWanted / group); }

// The scratch of one item; M = tokens x G rows, token by token.
template <class T>
struct PrefillScratch {
    int query_stride, sum_stride, key_words;
    Word<T>* query;  // [M, D in words]
    Word<T>* keys;  // [D in words, kKeyTile]
    Word<T>* values;  // [kKeyTile in words, Dv padded to 16]
    float* logits;  // [M, kKeyTile]
    Word<T>* weights;  // [M, kKeyTile in words]; the logits themselves where weights are floats
    float* sums;  // [M, Dv padded to 16]
    float *largest, *total;  // [M]
    T* copy;  // [16, D or Dv]

    PrefillScratch(Scratch& scratch, const Attention<T>& call, int rows) {
        constexpr int per_word = Words<T>::per_word, tile_words = kKeyTile / per_word;
        key_words = (call.key_dim + per_word - 1) / per_word;
        query_stride = round_up(key_words, kWidth);
        sum_stride = round_up(call.value_dim, kWidth);
        const size_t m = rows, copied = size_t(kTile) * std::max(call.key_dim, call.value_dim);
        scratch.reset(4 * (m * (query_stride + 2 * kKeyTile + sum_stride + 2) + kKeyTile * (key_words + sum_stride)) +
                      copied * sizeof(T) + 16 * 64);
        query = scratch.take<Word<T>>(m * query_stride);
        keys = scratch.take<Word<T>>(size_t(key_words) * kKeyTile);
        values = scratch.take<Word<T>>(size_t(tile_words) * sum_stride);
        logits = scratch.take<float>(m * kKeyTile);
        weights = per_word == 1 ? reinterpret_cast<Word<T>*>(logits) : scratch.take<Word<T>>(m * tile_words);
        sums = scratch.take<float>(m * sum_stride);
        largest = scratch.take<float>(m);
        total = scratch.take<float>(m);
        copy = scratch.take<T>(copied);
    }
};

// One row's softmax over a tile: logits [kKeyTile] to weights, only [first, last) of the tile visible.
template <class T>
inline void soften_row(PrefillScratch<T>& scratch, int row, int first, int last, const LogitScale& scale) {
    float* logits = scratch.logits + size_t(row) * kKeyTile;
    auto* weights = reinterpret_cast<Operand<T>*>(scratch.weights + size_t(row) * (kKeyTile / Words<T>::per_word));
    const float before = scratch.largest[row], here = logits_of(logits, kKeyTile, first, last, scale);
    const float largest = here > before ? here : before;
    const float total = weights_of(logits, weights, kKeyTile, largest);
    if (largest != before) {
        const Vec shrink(exp2_of(Vec(before - largest)));
        float* sums = scratch.sums + size_t(row) * scratch.sum_stride;
        for (int d = 0; d < scratch.sum_stride; d += kWidth) store(sums + d, load(sums + d) * shrink);
        float lanes[kWidth];
        store(lanes, shrink);
        scratch.total[row] *= lanes[0];
        scratch.largest[row] = largest;
    }
    scratch.total[row] += total;
}

// Tokens [token, token + count) of a sequence's chunk, for the G query heads of one KV head.
template <class T>
void prefill_tile(const Attention<T>& call, Scratch& memory, int seq, int kv_head, int token, int count) {
    const int group = call.group(), rows = count * group;
    const int64_t row0 = call.cu_seqlens_q[seq] + token;  // in the packed row
    const int held = call.context_lens[seq], position0 = held - call.num_queries(seq) + token;
    const int end = position0 + count, begin = call.first_visible(position0);
    PrefillScratch<T> scratch(memory, call, rows);
    for (int i = 0; i < count; ++i)
        for (int h = 0; h < group; ++h) {
            const int row = i * group + h;
            pack_query(call.query_row(row0 + i, kv_head * group + h),
                       scratch.query + size_t(row) * scratch.query_stride, call.key_dim);
            scratch.largest[row] = kNothingSeen, scratch.total[row] = 0.0f;
        }
    std::memset(scratch.sums, 0, size_t(rows) * scratch.sum_stride * sizeof(float));
    const Pages<T> keys(call.keys, call, seq, kv_head, call.key_dim);
    const Pages<T> values(call.values, call, seq, kv_head, call.value_dim);
    const LogitScale scale(call);
    constexpr int per_word = Words<T>::per_word;
    for (int tile = begin / kKeyTile * kKeyTile; tile < end; tile += kKeyTile) {
        for (int i = 0; i < kKeyTile; i += kTile)
            pack_keys(keys.tile(tile + i, begin, end, scratch.copy), scratch.keys + i, call.key_dim);
        // Tokens before the tile see none of it, and neither do those whose window has passed it.
        const int from = std::max(0, tile - position0);
        const int64_t passed = int64_t(tile) + kKeyTile - 1 + call.window - position0;
        const int to = call.window ? int(std::min<int64_t>(count, passed)) : count;
        const int row = from * group, num_rows = (to - from) * group;
        float* logits = scratch.logits + size_t(row) * kKeyTile;
        std::memset(logits, 0, size_t(num_rows) * kKeyTile * sizeof(float));
        multiply<T>(scratch.query + size_t(row) * scratch.query_stride, scratch.query_stride, scratch.keys, kKeyTile,
                    logits, kKeyTile, num_rows, kKeyTile, scratch.key_words);
        for (int i = from; i < to; ++i)
            for (int h = 0; h < group; ++h)
                soften_row(scratch, i * group + h, call.first_visible(position0 + i) - tile, position0 + i + 1 - tile,
                           scale);
        for (int i = 0; i < kKeyTile; i += kTile)
            pack_values(values.tile(tile + i, begin, end, scratch.copy),
                        scratch.values + size_t(i) / per_word * scratch.sum_stride, call.value_dim, scratch.sum_stride);
        multiply<T>(scratch.weights + size_t(row) * (kKeyTile / per_word), kKeyTile / per_word, scratch.values,
                    scratch.sum_stride, scratch.sums + size_t(row) * scratch.sum_stride, scratch.sum_stride, num_rows,
                    scratch.sum_stride, kKeyTile / per_word);
    }
    for (int row = 0; row < rows; ++row)
        write_head(call, row0 + row / group, kv_head * group + row % group, 1, [&](int) {
            return Partial{scratch.largest[row], scratch.total[row], scratch.sums + size_t(row) * scratch.sum_stride};
        });
}

}  // namespace cbgen
