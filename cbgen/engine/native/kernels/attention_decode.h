// Decode: one query token against everything its sequence holds, a split of at most 512 positions at a time.
//
// A work item is (sequence, KV head, split). All G query heads of the KV head go together, so that each key and value
// is read from memory once. Within a split there are three passes: dot products of all positions, softmax, weighted
// values; nothing is rescaled on the way. Splits lie at fixed positions: a sequence's sums never depend on its company.
#pragma once

#include "attention_problem.h"
#include "attention_softmax.h"

namespace cbgen {

constexpr int kSplit = 512;  // positions
constexpr int kAhead = 2 * kTile;  // positions between what is read and what is asked for

// What dot products and weighted sums take: bfloat16 as it is where the CPU multiplies it in pairs, else floats.
#ifdef CBGEN_BF16_DOT
template <class T>
struct OperandOf {
    using type = float;
};
template <>
struct OperandOf<Bf16> {
    using type = Bf16;
};
template <class T>
using Operand = typename OperandOf<T>::type;
#else
template <class T>
using Operand = float;
#endif

// -- dot products of sixteen keys -------------------------------------------------------------------------------------

#ifdef CBGEN_AVX512

inline Vec low_and_high(Vec a, Vec b) { return Vec(_mm512_unpacklo_ps(a.v, b.v)) + Vec(_mm512_unpackhi_ps(a.v, b.v)); }

// Four vectors to one: each 128-bit lane holds the four sums over that lane.
inline Vec sum_lanes(Vec a, Vec b, Vec c, Vec d) {
    const __m512d ab = _mm512_castps_pd(low_and_high(a, b).v), cd = _mm512_castps_pd(low_and_high(c, d).v);
    return Vec(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd))) + Vec(_mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
}

inline Vec even_and_odd_lanes(Vec a, Vec b) {
    return Vec(_mm512_shuffle_f32x4(a.v, b.v, 0x88)) + Vec(_mm512_shuffle_f32x4(a.v, b.v, 0xdd));
}

// The sums of 16 vectors, given as four results of `sum_lanes`.
inline Vec sum_quads(const Vec* quads) {
    return even_and_odd_lanes(even_and_odd_lanes(quads[0], quads[1]), even_and_odd_lanes(quads[2], quads[3]));
}

template <class T>
struct DotStep {  // 16 elements, in floats
    static constexpr int width = kWidth;
    using Piece = Vec;
    static Vec piece(const T* p) { return load(p); }
    static Vec piece_first(const T* p, int count) { return load_first(p, count); }
    static Vec query_piece(const float* p) { return load(p); }
    static Vec add(Vec sum, Vec key, Vec query) { return fma(key, query, sum); }
};

#ifdef CBGEN_BF16_DOT
template <>
struct DotStep<Bf16> {  // 32 elements, in pairs
    static constexpr int width = 2 * kWidth;
    using Piece = __m512i;
    static __m512i piece(const Bf16* p) { return _mm512_loadu_si512(p); }
    static __m512i piece_first(const Bf16* p, int count) { return _mm512_maskz_loadu_epi16((1u << count) - 1u, p); }
    static __m512i query_piece(const Bf16* p) { return _mm512_loadu_si512(p); }
    static Vec add(Vec sum, __m512i key, __m512i query) {
        return _mm512_dpbf16_ps(sum.v, (__m512bh)key, (__m512bh)query);
    }
};
#endif

// dots[h * kSplit + i] = query h . key i for 16 keys and H query heads.
template <int H, class T>
inline void dots_of_tile(const T* keys, int dim, const Operand<T>* query, int query_stride, float* dots, Ahead ahead) {
    using Step = DotStep<T>;
    Vec quads[H][4];
    for (int quad = 0; quad < 4; ++quad) {
        const T* rows = keys + quad * 4 * dim;
        ahead.fetch_part(quad, 4);
        Vec sums[H][4];
        for (int h = 0; h < H; ++h)
            for (int i = 0; i < 4; ++i) sums[h][i] = Vec(0.0f);
        int d = 0;
        for (; d + Step::width <= dim; d += Step::width) {
            typename Step::Piece piece[4];
            for (int i = 0; i < 4; ++i) piece[i] = Step::piece(rows + i * dim + d);
            for (int h = 0; h < H; ++h) {
                const auto q = Step::query_piece(query + h * query_stride + d);
                for (int i = 0; i < 4; ++i) sums[h][i] = Step::add(sums[h][i], piece[i], q);
            }
        }
        if (d < dim) {
            typename Step::Piece piece[4];
            for (int i = 0; i < 4; ++i) piece[i] = Step::piece_first(rows + i * dim + d, dim - d);
            for (int h = 0; h < H; ++h) {
                const auto q = Step::query_piece(query + h * query_stride + d);
                for (int i = 0; i < 4; ++i) sums[h][i] = Step::add(sums[h][i], piece[i], q);
            }
        }
        for (int h = 0; h < H; ++h) quads[h][quad] = sum_lanes(sums[h][0], sums[h][1], sums[h][2], sums[h][3]);
    }
    for (int h = 0; h < H; ++h) store(dots + h * kSplit, sum_quads(quads[h]));
}

#else

template <int H, class T>
inline void dots_of_tile(const T* keys, int dim, const float* query, int query_stride, float* dots, Ahead ahead) {
    for (int i = 0; i < kTile; ++i) {
        ahead.fetch_part(i, kTile);
        const T* key = keys + i * dim;
        for (int h = 0; h < H; ++h) {
            const float* q = query + h * query_stride;
            Lanes sums[kPieces] = {}, pieces[kPieces];
            for (int d = 0; d < dim; d += kWidth) {
                sixteen_of(key + d, dim - d, pieces);
                for (int c = 0; c < kPieces; ++c) sums[c] += pieces[c] * lanes_of(q + d + c * kLanes);
            }
            for (int c = 1; c < kPieces; ++c) sums[0] += sums[c];
            float sum = 0.0f;
            for (int lane = 0; lane < kLanes; ++lane) sum += sums[0][lane];
            dots[h * kSplit + i] = sum;
        }
    }
}

#endif

// -- weighted sums of sixteen values ----------------------------------------------------------------------------------

// sums[h * sum_stride + c] += sum over 16 positions of weight x value, columns [c, c + 16 * C), H query heads.
#ifdef CBGEN_AVX512

template <int H, int C, class T>
inline void add_columns(const T* values, int dim, const float* weights, float* sums, int sum_stride, int column,
                        Ahead ahead) {
    Vec kept[H][C];
    for (int h = 0; h < H; ++h)
        for (int c = 0; c < C; ++c) kept[h][c] = load(sums + h * sum_stride + column + c * kWidth);
    for (int i = 0; i < kTile; ++i) {
        ahead.fetch_part(i, kTile);
        Vec value[C];
        const T* row = values + i * dim + column;
        const int left = dim - column;
        for (int c = 0; c < C; ++c)
            value[c] = left >= C * kWidth ? load(row + c * kWidth) : load_first(row, left);  // a short one has C = 1
        for (int h = 0; h < H; ++h) {
            const Vec weight(weights[h * kSplit + i]);
            for (int c = 0; c < C; ++c) kept[h][c] = fma(weight, value[c], kept[h][c]);
        }
    }
    for (int h = 0; h < H; ++h)
        for (int c = 0; c < C; ++c) store(sums + h * sum_stride + column + c * kWidth, kept[h][c]);
}

#else

template <int H, int C, class T>
inline void add_columns(const T* values, int dim, const float* weights, float* sums, int sum_stride, int column,
                        Ahead ahead) {
    static_assert(C == 1, "more would not fit into the registers of most CPUs");
    Lanes kept[H][kPieces], value[kPieces];
    for (int h = 0; h < H; ++h) sixteen_of(sums + h * sum_stride + column, kWidth, kept[h]);
    for (int i = 0; i < kTile; ++i) {
        ahead.fetch_part(i, kTile);
        sixteen_of(values + i * dim + column, dim - column, value);
        for (int h = 0; h < H; ++h)
            for (int c = 0; c < kPieces; ++c) kept[h][c] += weights[h * kSplit + i] * value[c];
    }
    for (int h = 0; h < H; ++h) std::memcpy(sums + h * sum_stride + column, kept[h], sizeof(kept[h]));
}

#endif

template <int H, class T>
inline void add_tile(const T* values, int dim, const float* weights, float* sums, int sum_stride, Ahead ahead) {
    int column = 0;
#ifdef CBGEN_AVX512
    for (; column + 4 * kWidth <= dim; column += 4 * kWidth, ahead = {})
        add_columns<H, 4>(values, dim, weights, sums, sum_stride, column, ahead);
#endif
    for (; column < dim; column += kWidth, ahead = {})
        add_columns<H, 1>(values, dim, weights, sums, sum_stride, column, ahead);
}

#ifdef CBGEN_BF16_DOT

// Two rows interleaved 128-bit lane by lane, the order of the pairwise product. Sums are brought into this order when
// loaded, and put straight when stored.
inline __m512i lanes_low() { return _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27); }
inline __m512i lanes_high() { return _mm512_setr_epi32(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31); }
inline __m512i straight_low() { return _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23); }
inline __m512i straight_high() {
    return _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
}

// As above with columns [column, column + 32 * C); `sums` is padded to 32 columns.
template <int H, int C>
inline void add_column_pairs(const Bf16* values, int dim, const Bf16* weights, float* sums, int sum_stride, int column,
                             Ahead ahead) {
    Vec kept[H][2 * C];
    for (int h = 0; h < H; ++h)
        for (int c = 0; c < C; ++c) {
            const float* p = sums + h * sum_stride + column + 32 * c;
            const __m512 a = load(p).v, b = load(p + kWidth).v;
            kept[h][2 * c] = _mm512_permutex2var_ps(a, lanes_low(), b);
            kept[h][2 * c + 1] = _mm512_permutex2var_ps(a, lanes_high(), b);
        }
    const int left = dim - column;
    const __mmask32 mask = left >= 32 ? ~0u : (1u << left) - 1u;
    for (int i = 0; i < kTile; i += 2) {
        ahead.fetch_part(i / 2, kTile / 2);
        __m512i pairs[2 * C];
        for (int c = 0; c < C; ++c) {
            const Bf16* row = values + i * dim + column + 32 * c;
            const __m512i a = C > 1 ? _mm512_loadu_si512(row) : _mm512_maskz_loadu_epi16(mask, row);
            const __m512i b = C > 1 ? _mm512_loadu_si512(row + dim) : _mm512_maskz_loadu_epi16(mask, row + dim);
            pairs[2 * c] = _mm512_unpacklo_epi16(a, b);
            pairs[2 * c + 1] = _mm512_unpackhi_epi16(a, b);
        }
        for (int h = 0; h < H; ++h) {
            int32_t pair;
            std::memcpy(&pair, weights + h * kSplit + i, 4);
            const __m512bh weight = (__m512bh)_mm512_set1_epi32(pair);
            for (int c = 0; c < 2 * C; ++c)
                kept[h][c] = _mm512_dpbf16_ps(kept[h][c].v, (__m512bh)pairs[c], weight);
        }
    }
    for (int h = 0; h < H; ++h)
        for (int c = 0; c < C; ++c) {
            float* p = sums + h * sum_stride + column + 32 * c;
            const __m512 a = kept[h][2 * c].v, b = kept[h][2 * c + 1].v;
            store(p, Vec(_mm512_permutex2var_ps(a, straight_low(), b)));
            store(p + kWidth, Vec(_mm512_permutex2var_ps(a, straight_high(), b)));
        }
}

template <int H>
inline void add_tile(const Bf16* values, int dim, const Bf16* weights, float* sums, int sum_stride, Ahead ahead) {
    int column = 0;
    for (; column + 64 <= dim; column += 64, ahead = {})
        add_column_pairs<H, 2>(values, dim, weights, sums, sum_stride, column, ahead);
    for (; column < dim; column += 32, ahead = {})
        add_column_pairs<H, 1>(values, dim, weights, sums, sum_stride, column, ahead);
}

#endif

// -- a work item ------------------------------------------------------------------------------------------------------

// Calls f(Size<H>{}, first head) over `count` heads, four at a time.
template <int N>
struct Size {
    static constexpr int value = N;
};
template <class F>
inline void by_heads(int count, F f) {
    int head = 0;
    for (; head + 4 <= count; head += 4) f(Size<4>{}, head);
    if (count - head == 3) f(Size<3>{}, head);
    if (count - head == 2) f(Size<2>{}, head);
    if (count - head == 1) f(Size<1>{}, head);
}

inline void load_query(const float* from, float* to, int dim) { std::memcpy(to, from, dim * sizeof(float)); }
inline void load_query(const Bf16* from, Bf16* to, int dim) { std::memcpy(to, from, dim * sizeof(Bf16)); }
template <class T>
inline void load_query(const T* from, float* to, int dim) {
    for (int d = 0; d < dim; ++d) to[d] = to_float(from[d]);
}

// The scratch of one item: queries, logits, weights, and the sums for [G] heads.
template <class T>
struct DecodeScratch {
    Operand<T>* query;  // [G, D padded to 32]
    float* logits;  // [G, kSplit]
    Operand<T>* weights;  // [G, kSplit]; the logits themselves where weights are floats
    T* copy;  // [16, D or Dv] for a tile that is not whole
    int query_stride;

    DecodeScratch(Scratch& scratch, const Attention<T>& call) : query_stride(round_up(call.key_dim, 32)) {
        const size_t group = call.group(), dim = std::max(call.key_dim, call.value_dim);
        const size_t weights_count = sizeof(Operand<T>) == 4 ? 0 : group * kSplit;
        scratch.reset(Scratch::padded<Operand<T>>(group * query_stride) + Scratch::padded<float>(group * kSplit) +
                      Scratch::padded<Operand<T>>(weights_count) + Scratch::padded<T>(kTile * dim));
        query = scratch.take<Operand<T>>(group * query_stride);
        logits = scratch.take<float>(group * kSplit);
        weights = scratch.take<Operand<T>>(weights_count);
        if (weights_count == 0) weights = reinterpret_cast<Operand<T>*>(logits);
        copy = scratch.take<T>(kTile * dim);
    }
};

// Positions [begin, end) of a sequence, all in one split, for the G query heads of one KV head.
struct Stretch {
    int32_t seq, kv_head, begin, end;

    int first_tile() const { return begin / kTile * kTile; }
    int num_padded() const { return round_up(end - first_tile(), kTile); }
};

// Leaves largest[G], total[G] and sums[G, sum_stride] of a stretch; sum_stride is Dv padded to 32. `next` is the
// stretch to come, or null: its first keys are asked for near this one's end, as this one's were unless `is_first`.
template <class T>
void decode_stretch(const Attention<T>& call, Scratch& memory, const Stretch& stretch, const Stretch* next,
                    bool is_first, float* largest, float* total, float* sums, int sum_stride) {
    const DecodeScratch<T> scratch(memory, call);
    const int group = call.group(), begin = stretch.begin, end = stretch.end, first_tile = stretch.first_tile();
    const Pages<T> keys(call.keys, call, stretch.seq, stretch.kv_head, call.key_dim);
    const Pages<T> values(call.values, call, stretch.seq, stretch.kv_head, call.value_dim);
    for (int i = 0; is_first && i < kAhead; i += kTile) keys.ahead(first_tile + i, end).fetch_part(0, 1);
    for (int h = 0; h < group; ++h) {
        Operand<T>* row = scratch.query + h * scratch.query_stride;
        std::memset(static_cast<void*>(row), 0, scratch.query_stride * sizeof(Operand<T>));
        load_query(call.query_row(call.cu_seqlens_q[stretch.seq], stretch.kv_head * group + h), row, call.key_dim);
    }
    for (int position = first_tile; position < end; position += kTile) {
        const int later = position + kAhead;
        Ahead ahead = later < end ? keys.ahead(later, end) : values.ahead(later - stretch.num_padded(), end);
        const T* tile = keys.tile(position, begin, end, scratch.copy);
        by_heads(group, [&](auto size, int h) {
            float* dots = scratch.logits + h * kSplit + position - first_tile;
            dots_of_tile<decltype(size)::value>(tile, call.key_dim, scratch.query + h * scratch.query_stride,
                                                scratch.query_stride, dots, ahead);
            ahead = {};
        });
    }
    const LogitScale scale(call);
    const int count = round_up(end - first_tile, 2 * kWidth);
    for (int h = 0; h < group; ++h) {
        float* logits = scratch.logits + h * kSplit;
        largest[h] = logits_of(logits, count, begin - first_tile, end - first_tile, scale);
        total[h] = weights_of(logits, scratch.weights + h * kSplit, count, largest[h]);
    }
    std::memset(sums, 0, size_t(group) * sum_stride * sizeof(float));
    for (int position = first_tile; position < end; position += kTile) {
        const int later = position + kAhead;
        Ahead ahead;
        if (later < end) {
            ahead = values.ahead(later, end);
        } else if (next != nullptr) {
            const Pages<T> next_keys(call.keys, call, next->seq, next->kv_head, call.key_dim);
            ahead = next_keys.ahead(later - first_tile - stretch.num_padded() + next->first_tile(), next->end);
        }
        const T* tile = values.tile(position, begin, end, scratch.copy);
        by_heads(group, [&](auto size, int h) {
            add_tile<decltype(size)::value>(tile, call.value_dim, scratch.weights + h * kSplit + position - first_tile,
                                            sums + h * sum_stride, sum_stride, ahead);
            ahead = {};
        });
    }
}

}  // namespace cbgen
