// The small operators of a layer: RMS norm, activation, rotary embedding, and writing to the KV cache.
//
// Everything goes row by row; a row is read, computed in float and written by one thread, so that nothing depends on its
// company. Strides are in elements; the last dimension is contiguous.
#include "vec.h"

using namespace cbgen;

namespace {

constexpr int64_t kParallelWork = 1 << 15;  // elements below which a second thread costs more than it gives
constexpr int kMaxHeadDim = 1024;           // the caller checks

inline int threads_for(int64_t work, int num_threads) { return work < kParallelWork ? 1 : num_threads; }

// f(i, count) for every stretch of up to sixteen elements.
template <class F>
inline void for_stretches(int64_t n, F f) {
    for (int64_t i = 0; i < n; i += kWidth) f(i, n - i < kWidth ? int(n - i) : kWidth);
}

template <class T>
inline Vec read(const T* p, int count) {
    return count == kWidth ? load(p) : load_first(p, count);
}

template <class T>
inline void write(T* p, Vec a, int count) {
    if (count == kWidth)
        store(p, a);
    else
        store_first(p, a, count);
}

template <class T>
inline float inverse_rms(const T* x, int64_t n, float eps) {
    Vec squares(0.0f);
    for_stretches(n, [&](int64_t i, int count) {
        const Vec a = read(x + i, count);
        squares = fma(a, a, squares);
    });
    return 1.0f / std::sqrt(sum(squares) / float(n) + eps);
}

// y = x / rms(x) * weight; x and y may be the same.
template <class From, class To>
inline void norm_row(const From* x, const float* weight, float eps, To* y, int64_t n) {
    const Vec scale(inverse_rms(x, n, eps));
    for_stretches(n, [&](int64_t i, int count) {
        write(y + i, read(x + i, count) * scale * read(weight + i, count), count);
    });
}

template <class T>
inline void add_row(const T* x, T* residual, int64_t n) {
    for_stretches(n, [&](int64_t i, int count) {
        write(residual + i, read(residual + i, count) + read(x + i, count), count);
    });
}

template <class From, class To>
inline void copy_row(const From* x, To* y, int64_t n) {
    for_stretches(n, [&](int64_t i, int count) { write(y + i, read(x + i, count), count); });
}

inline Vec silu(Vec x) { return x / (Vec(1.0f) + exp(Vec(0.0f) - x)); }

// x / 2 * (1 + tanh(u)) written with e^(-2u), which keeps small results exact. u = sqrt(2 / pi) (x + 0.044715 x^3)
inline Vec gelu_tanh(Vec x) {
    const Vec u = x * fma(x * x, Vec(0.7978845608f * 0.044715f), Vec(0.7978845608f));
    return x / (Vec(1.0f) + exp(Vec(-2.0f) * u));
}

// Rotate the first `num_rotated` values of a head, each of their first half with its partner in the second.
inline void rotate_head(float* head, const float* cos, const float* sin, int num_rotated) {
    const int half = num_rotated / 2;
    for_stretches(half, [&](int64_t i, int count) {
        const Vec a = read(head + i, count), b = read(head + half + i, count);
        write(head + i, a * read(cos + i, count) - b * read(sin + i, count), count);
        write(head + half + i, b * read(cos + half + i, count) + a * read(sin + half + i, count), count);
    });
}

struct Rotation {
    const float *cos, *sin;
    int num_rotated;
    float eps;
};

// One head: normed if there is a weight, rotated, and written to `y`, which may be where it came from.
template <class T>
inline void turn_head(const T* x, const float* norm_weight, const Rotation& rotation, T* y, int head_dim) {
    float head[kMaxHeadDim];
    if (norm_weight)
        norm_row(x, norm_weight, rotation.eps, head, head_dim);
    else
        copy_row(x, head, head_dim);
    rotate_head(head, rotation.cos, rotation.sin, rotation.num_rotated);
    copy_row(head, y, head_dim);
}

// Where a token's vector of one head lies in a cache [num_blocks, num_kv_heads, block_size, head_dim].
inline int64_t cache_offset(int64_t slot, int64_t head, int64_t num_kv_heads, int64_t block_size, int64_t head_dim) {
    return ((slot / block_size * num_kv_heads + head) * block_size + slot % block_size) * head_dim;
}

}  // namespace

// y[T, H] = norm of x[T, H], or, if there is a residual [T, H], of what residual + x is after rounding to its type.
CBGEN_EXPORT void cbgen_rms_norm(const void* x, int64_t x_stride, void* residual, int64_t residual_stride,
                                 const float* weight, float eps, void* y, int64_t y_stride, int64_t num_rows,
                                 int64_t size, int dtype, int num_threads) {
    dispatch(dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
#pragma omp parallel for num_threads(threads_for(num_rows * size, num_threads)) schedule(static)
        for (int64_t row = 0; row < num_rows; ++row) {
            const T* input = static_cast<const T*>(x) + row * x_stride;
            if (residual) {
                T* target = static_cast<T*>(residual) + row * residual_stride;
                add_row(input, target, size);
                input = target;
            }
            norm_row(input, weight, eps, static_cast<T*>(y) + row * y_stride, size);
        }
    });
}

// y[T, size] = act(x[T, :size]) * x[T, size:]. activation 0: silu, 1: gelu by tanh.
CBGEN_EXPORT void cbgen_activation_mul(const void* x, int64_t x_stride, void* y, int64_t y_stride, int64_t num_rows,
                                       int64_t size, int activation, int dtype, int num_threads) {
    dispatch(dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
#pragma omp parallel for num_threads(threads_for(num_rows * size, num_threads)) schedule(static)
        for (int64_t row = 0; row < num_rows; ++row) {
            const T* gate = static_cast<const T*>(x) + row * x_stride;
            const T* up = gate + size;
            T* out = static_cast<T*>(y) + row * y_stride;
            for_stretches(size, [&](int64_t i, int count) {
                const Vec g = read(gate + i, count);
                write(out + i, (activation == 0 ? silu(g) : gelu_tanh(g)) * read(up + i, count), count);
            });
        }
    });
}

// Norm (where there are weights, [D] float) and rotate queries, in place, and keys; store keys and values.
// qkv: [T, (Hq + 2 Hkv) * D]. cos, sin: [T, R]. Caches: [num_blocks, Hkv, block_size, D].
CBGEN_EXPORT void cbgen_rope_and_store(void* qkv, int64_t qkv_stride, const void* cos, int64_t cos_stride,
                                       const void* sin, int64_t sin_stride, int rotary_dtype, int num_rotated,
                                       const float* query_norm, const float* key_norm, float eps, void* key_cache,
                                       void* value_cache, const int64_t* slot_mapping, int64_t num_tokens,
                                       int num_heads, int num_kv_heads, int head_dim, int64_t block_size, int dtype,
                                       int num_threads) {
    const int64_t work = num_tokens * (num_heads + 2 * num_kv_heads) * head_dim;
    dispatch(dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
#pragma omp parallel for num_threads(threads_for(work, num_threads)) schedule(static)
        for (int64_t token = 0; token < num_tokens; ++token) {
            float cosines[kMaxHeadDim], sines[kMaxHeadDim];
            dispatch(rotary_dtype, [&](auto rotary_tag) {
                using R = typename decltype(rotary_tag)::type;
                copy_row(static_cast<const R*>(cos) + token * cos_stride, cosines, num_rotated);
                copy_row(static_cast<const R*>(sin) + token * sin_stride, sines, num_rotated);
            });
            const Rotation rotation{cosines, sines, num_rotated, eps};
            T* query = static_cast<T*>(qkv) + token * qkv_stride;
            const T* key = query + int64_t(num_heads) * head_dim;
            const T* value = key + int64_t(num_kv_heads) * head_dim;
            for (int head = 0; head < num_heads; ++head)
                turn_head(query + head * head_dim, query_norm, rotation, query + head * head_dim, head_dim);
            for (int head = 0; head < num_kv_heads; ++head) {
                const int64_t at = cache_offset(slot_mapping[token], head, num_kv_heads, block_size, head_dim);
                turn_head(key + head * head_dim, key_norm, rotation, static_cast<T*>(key_cache) + at, head_dim);
                std::memcpy(static_cast<T*>(value_cache) + at, value + head * head_dim, head_dim * sizeof(T));
            }
        }
    });
}

// Write x[T, Hkv, D] into a cache [num_blocks, Hkv, block_size, D] of the same type.
CBGEN_EXPORT void cbgen_store(const void* x, int64_t token_stride, int64_t head_stride, void* cache,
                              const int64_t* slot_mapping, int64_t num_tokens, int num_kv_heads, int head_dim,
                              int64_t block_size, int element_bytes, int num_threads) {
    const int64_t work = num_tokens * num_kv_heads * head_dim;
#pragma omp parallel for num_threads(threads_for(work, num_threads)) schedule(static)
    for (int64_t token = 0; token < num_tokens; ++token) {
        for (int head = 0; head < num_kv_heads; ++head) {
            const int64_t to = cache_offset(slot_mapping[token], head, num_kv_heads, block_size, head_dim);
            const int64_t from = token * token_stride + head * head_stride;
            std::memcpy(static_cast<char*>(cache) + to * element_bytes,
                        static_cast<const char*>(x) + from * element_bytes, size_t(head_dim) * element_bytes);
        }
    }
}

// y[n] = x[n] in another element type.
CBGEN_EXPORT void cbgen_cast(const void* x, int from, void* y, int to, int64_t n, int num_threads) {
    constexpr int64_t chunk = 1 << 14;
    dispatch(from, [&](auto from_tag) {
        dispatch(to, [&](auto to_tag) {
            using From = typename decltype(from_tag)::type;
            using To = typename decltype(to_tag)::type;
#pragma omp parallel for num_threads(threads_for(n, num_threads)) schedule(static)
            for (int64_t start = 0; start < n; start += chunk) {
                const int64_t count = n - start < chunk ? n - start : chunk;
                copy_row(static_cast<const From*>(x) + start, static_cast<To*>(y) + start, count);
            }
        });
    });
}

// y[n] = e^x[n], for the tests.
CBGEN_EXPORT void cbgen_exp(const float* x, float* y, int64_t n) {
    for_stretches(n, [&](int64_t i, int count) { write(y + i, exp(read(x + i, count)), count); });
}
