// From dot products to weights: scale, soft cap, mask, maximum, exponential, sum. Everything is in powers of two, so
// that one multiplication serves both the scale and the change of base.
#pragma once

#include <cmath>

#include "attention_problem.h"

namespace cbgen {

template <class V>
inline V constant(float value) {
#ifdef CBGEN_AVX512
    return V(value);
#else
    return V{} + value;
#endif
}

// 2^f for f in [-1/2, 1/2]: the minimax polynomial with the constant held at 1; relative error about 1e-7.
template <class V>
inline V exp2_of_fraction(V f) {
    V p = constant<V>(0.001326472f) * f + constant<V>(0.009671513f);  // the compiler fuses these where the CPU can
    p = p * f + constant<V>(0.055507338f);
    p = p * f + constant<V>(0.240222421f);
    p = p * f + constant<V>(0.693146978f);
    return p * f + constant<V>(1.0f);
}

// 2^y for y <= 127; -inf gives 0 exactly, NaN stays NaN.
#ifdef CBGEN_AVX512
inline Vec exp2_of(Vec y) {
    y = max(Vec(-200.0f), y);  // -inf would become inf - inf
    const Vec whole = _mm512_roundscale_ps(y.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_scalef_ps(exp2_of_fraction(y - whole).v, whole.v);
}
#else
inline Vec exp2_of(Vec all) {
    typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
    for (int i = 0; i < kWidth; i += kLanes) {
        Lanes y = lanes_of(all.v + i);
        y = y < -127.0f ? Lanes{} - 127.0f : y;
        y = y > 127.0f ? Lanes{} + 127.0f : y;
        const float magic = 12582912.0f;  // 1.5 x 2^23: what is added to it loses its fraction
        const Lanes whole = (y + magic) - magic;
        const Ints exponent = __builtin_convertvector(whole, Ints) + 127;  // that of -127 is the exponent of 0
        const Lanes result = exp2_of_fraction(y - whole) * (Lanes)(exponent << 23);
        std::memcpy(all.v + i, &result, sizeof(result));
    }
    return all;
}
#endif

inline float exp2_of(float y) {
    float lanes[kWidth];
    store(lanes, exp2_of(Vec(y)));
    return lanes[0];
}

// Lanes outside [first, last) become -inf.
inline Vec keep_lanes(Vec a, int first, int last) {
    first = std::min(std::max(first, 0), kWidth), last = std::min(std::max(last, 0), kWidth);
#ifdef CBGEN_AVX512
    const uint32_t mask = ((1u << last) - 1u) & ~((1u << first) - 1u);
    return _mm512_mask_blend_ps(__mmask16(mask), _mm512_set1_ps(-INFINITY), a.v);
#else
    for (int i = 0; i < kWidth; ++i) a.v[i] = i >= first && i < last ? a.v[i] : -INFINITY;
    return a;
#endif
}

// Dot products to logits, in powers of two.
struct LogitScale {
    float scale;  // of the dot products
    float softcap;  // 0: none

    template <class T>
    explicit LogitScale(const Attention<T>& call)
        : scale(call.softcap > 0 ? 2 * kLog2E * call.scale / call.softcap : kLog2E * call.scale),
          softcap(call.softcap * kLog2E) {}

    Vec operator()(Vec dot) const {
        const Vec scaled = dot * Vec(scale);
        if (softcap == 0) return scaled;
        const Vec power = exp2_of(min(Vec(127.0f), scaled));  // tanh(x) = 1 - 2 / (exp(2x) + 1)
        return Vec(softcap) * (Vec(1.0f) - Vec(2.0f) / (power + Vec(1.0f)));
    }
};

// Logits in place, those outside [first, last) -inf; returns the largest. `count` is a multiple of 16.
inline float logits_of(float* dots, int count, int first, int last, const LogitScale& scale) {
    Vec largest(-INFINITY);
    for (int i = 0; i < count; i += kWidth) {
        Vec logit = scale(load(dots + i));
        if (i < first || i + kWidth > last) logit = keep_lanes(logit, first - i, last - i);
        largest = max(largest, logit);
        store(dots + i, logit);
    }
    return max_of(largest);
}

// How weights are handed to the sum over values: as floats, or rounded to bfloat16 for the pairwise dot product.
inline void store_weights(float* out, Vec a, Vec b) {
    store(out, a);
    store(out + kWidth, b);
}
#ifdef CBGEN_BF16_DOT
inline void store_weights(Bf16* out, Vec a, Vec b) {
    _mm512_storeu_si512(out, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b.v, a.v)));
}
#endif

// weights = 2^(logits - largest), in place where W is float; returns their sum. `count` is a multiple of 32.
template <class W>
inline float weights_of(const float* logits, W* weights, int count, float largest) {
    const Vec shift(largest);
    Vec total(0.0f);
    for (int i = 0; i < count; i += 2 * kWidth) {
        const Vec a = exp2_of(load(logits + i) - shift), b = exp2_of(load(logits + i + kWidth) - shift);
        store_weights(weights + i, a, b);
        total = total + (a + b);
    }
    return sum(total);
}

// One query head's sum over some positions: `largest` logit, `total` weight, and weighted values.
struct Partial {
    float largest, total;
    const float* values;  // [Dv]
};

// Joins `count` partial sums in their order, adds the head's sink, divides, and writes [Dv].
template <class T, class PartialAt>
inline void write_head(const Attention<T>& call, int64_t token, int head, int count, PartialAt partial_at) {
    float largest = call.sinks ? call.sinks[head] * kLog2E : kNothingSeen;
    for (int i = 0; i < count; ++i) {
        const float candidate = partial_at(i).largest;
        largest = candidate > largest ? candidate : largest;
    }
    float total = call.sinks ? exp2_of(call.sinks[head] * kLog2E - largest) : 0.0f;
    for (int i = 0; i < count; ++i) total += partial_at(i).total * exp2_of(partial_at(i).largest - largest);
    float joined[kMaxDim] = {};
    for (int i = 0; i < count; ++i) {
        const Partial part = partial_at(i);
        const Vec factor(exp2_of(part.largest - largest));
        for (int d = 0; d < call.value_dim; d += kWidth)  // partial sums are padded to 16
            store(joined + d, fma(factor, load(part.values + d), load(joined + d)));
    }
    T* out = call.out + (token * call.num_heads + head) * call.value_dim;
    const Vec inverse(1.0f / total);
    for (int d = 0; d < call.value_dim; d += kWidth)
        store_first(out + d, load(joined + d) * inverse, std::min(kWidth, call.value_dim - d));
}

}  // namespace cbgen
