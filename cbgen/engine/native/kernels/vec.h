// Sixteen floats at a time, over AVX-512 where the compiler has it and over a plain array elsewhere (which compilers
// turn into whatever vectors the CPU has). Element types: float, Bf16, F16; arithmetic is always in float.
//
// A kernel is written once, against `Vec` and `load` / `store`, and templated on the element type.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(CBGEN_PLAIN)
#define CBGEN_AVX512 1
#include <immintrin.h>
#endif

// The library exports what says so, and nothing else.
#define CBGEN_EXPORT extern "C" __attribute__((visibility("default")))

namespace cbgen {

struct Bf16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};

constexpr int kWidth = 16;

// -- one element ------------------------------------------------------------------------------------------------------

inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float to_float(float value) { return value; }

inline float to_float(Bf16 value) { return bits_to_float(uint32_t(value.bits) << 16); }

inline float to_float(F16 value) {
    const uint32_t sign = uint32_t(value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
    // Shifted into float's place the exponent is 112 too small; the product puts that right, also for subnormals.
    const float magnitude = bits_to_float(rest << 13) * bits_to_float(0x77800000u);  // x 2^112
    const uint32_t bits = rest >= 0x7c00u ? 0x7f800000u | (rest << 13) : float_to_bits(magnitude);
    return bits_to_float(sign | bits);
}

template <class T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
    return value;
}

template <>
inline Bf16 from_float<Bf16>(float value) {  // to the nearest, ties to even; NaN stays NaN
    const uint32_t bits = float_to_bits(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return Bf16{uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded)};
}

template <>
inline F16 from_float<F16>(float value) {  // to the nearest, ties to even; past the range it is infinity
    const uint32_t bits = float_to_bits(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    uint32_t half;
    if (rest >= 0x7f800000u) {
        half = rest > 0x7f800000u ? 0x7e00u : 0x7c00u;
    } else if (rest >= 0x47800000u) {  // 2^16 and more
        half = 0x7c00u;
    } else if (rest < 0x38800000u) {  // below 2^-14 the result is subnormal: adding 0.5 lets the FPU round to 2^-24
        half = float_to_bits(bits_to_float(rest) + 0.5f) - 0x3f000000u;
    } else {
        const uint32_t rebased = rest - 0x38000000u;
        half = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;
    }
    return F16{uint16_t(sign | half)};
}

// -- sixteen elements -------------------------------------------------------------------------------------------------

#ifdef CBGEN_AVX512

struct Vec {
    __m512 v;
    Vec() = default;
    Vec(__m512 value) : v(value) {}
    explicit Vec(float value) : v(_mm512_set1_ps(value)) {}
};

inline Vec operator+(Vec a, Vec b) { return _mm512_add_ps(a.v, b.v); }
inline Vec operator-(Vec a, Vec b) { return _mm512_sub_ps(a.v, b.v); }
inline Vec operator*(Vec a, Vec b) { return _mm512_mul_ps(a.v, b.v); }
inline Vec operator/(Vec a, Vec b) { return _mm512_div_ps(a.v, b.v); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
// If either is NaN both give b, on every CPU.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a.v, b.v); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a.v, b.v); }

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const Bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline Vec load(const F16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void store(Bf16* p, Vec a) {
    // By hand rather than with VCVTNEPS2BF16, which flushes subnormals: the same bits on every CPU.
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    const __m512i chosen = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16)));
}
inline void store(F16* p, Vec a) {
    const __m256i half = _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
}

inline bool any_nan(Vec a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0; }
// x * 2^n for whole numbers n, also where the result is subnormal or past the range.
inline Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x.v, n.v); }

// The first `count` (0 to 16) elements; the others read as 0 and are not written.
inline __mmask16 first(int count) { return __mmask16((1u << count) - 1u); }
inline Vec load_first(const float* p, int count) { return _mm512_maskz_loadu_ps(first(count), p); }
inline Vec load_first(const Bf16* p, int count) {
    const __m256i half = _mm256_maskz_loadu_epi16(first(count), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline Vec load_first(const F16* p, int count) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), p));
}
inline void store_first(float* p, Vec a, int count) { _mm512_mask_storeu_ps(p, first(count), a.v); }
template <class T>
inline void store_first(T* p, Vec a, int count) {
    T whole[kWidth];
    store(whole, a);
    std::memcpy(p, whole, count * sizeof(T));
}

#else

struct Vec {
    float v[kWidth];
    Vec() = default;
    explicit Vec(float value) {
        for (int i = 0; i < kWidth; ++i) v[i] = value;
    }
};

template <class F>
inline Vec map(F f) {
    Vec result;
    for (int i = 0; i < kWidth; ++i) result.v[i] = f(i);
    return result;
}

inline Vec operator+(Vec a, Vec b) {
    return map([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec operator-(Vec a, Vec b) {
    return map([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec operator*(Vec a, Vec b) {
    return map([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec operator/(Vec a, Vec b) {
    return map([&](int i) { return a.v[i] / b.v[i]; });
}
inline Vec fma(Vec a, Vec b, Vec c) {  // the compiler fuses it where the CPU can
    return map([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline Vec max(Vec a, Vec b) {
    return map([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec min(Vec a, Vec b) {
    return map([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}

inline bool any_nan(Vec a) {
    int found = 0;
    for (int i = 0; i < kWidth; ++i) found |= a.v[i] != a.v[i];
    return found != 0;
}
inline Vec scale_by_power(Vec x, Vec n) {  // in two steps, neither of which leaves the range of exponents
    return map([&](int i) {
        const int power = int(n.v[i]), half = power >> 1;
        return x.v[i] * bits_to_float(uint32_t(half + 127) << 23) * bits_to_float(uint32_t(power - half + 127) << 23);
    });
}

template <class T>
inline Vec load(const T* p) {
    return map([&](int i) { return to_float(p[i]); });
}
template <class T>
inline void store(T* p, Vec a) {
    for (int i = 0; i < kWidth; ++i) p[i] = from_float<T>(a.v[i]);
}
template <class T>
inline Vec load_first(const T* p, int count) {
    return map([&](int i) { return i < count ? to_float(p[i]) : 0.0f; });
}
template <class T>
inline void store_first(T* p, Vec a, int count) {
    for (int i = 0; i < count; ++i) p[i] = from_float<T>(a.v[i]);
}

#endif

// Sum and maximum of the sixteen, always in the same order: halves onto halves.
inline float sum(Vec a) {
    float v[kWidth];
    store(v, a);
    for (int half = kWidth / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) v[i] += v[i + half];
    return v[0];
}
inline float max_of(Vec a) {
    float v[kWidth];
    store(v, a);
    for (int half = kWidth / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
    return v[0];
}

// e^x within two units of the last place; 0 below -104, infinity above 88.8, NaN for NaN. Cody and Waite's reduction to
// |r| <= ln(2) / 2, then the Taylor polynomial of degree 7.
inline Vec exp(Vec x) {
    x = max(Vec(-104.0f), min(Vec(89.0f), x));  // in this order of operands NaN passes
    const Vec magic(12582912.0f);               // 1.5 x 2^23: adding it rounds to a whole number
    const Vec n = fma(x, Vec(1.44269504f), magic) - magic;
    const Vec r = fma(n, Vec(-1.42860677e-6f), fma(n, Vec(-0.693145752f), x));
    Vec p(1.0f / 5040);
    p = fma(p, r, Vec(1.0f / 720));
    p = fma(p, r, Vec(1.0f / 120));
    p = fma(p, r, Vec(1.0f / 24));
    p = fma(p, r, Vec(1.0f / 6));
    p = fma(p, r, Vec(0.5f));
    p = fma(p, r, Vec(1.0f));
    p = fma(p, r, Vec(1.0f));
    return scale_by_power(p, n);
}

// -- from a dtype code to a type --------------------------------------------------------------------------------------

template <class T>
struct Tag {
    using type = T;
};

// Calls f(Tag<T>{}) for the code's element type: 0 float32, 1 bfloat16, 2 float16.
template <class F>
inline void dispatch(int dtype, F f) {
    if (dtype == 0) f(Tag<float>{});
    if (dtype == 1) f(Tag<Bf16>{});
    if (dtype == 2) f(Tag<F16>{});
}

}  // namespace cbgen
