// What one attention call works on, and how keys and values are fetched from the paged cache.
//
// Letters as everywhere: T tokens of B sequences in one packed row, Hq query heads, Hkv KV heads, G = Hq / Hkv query
// heads per KV head, D and Dv sizes of a key and a value.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "vec.h"

#if defined(CBGEN_AVX512) && defined(__AVX512BF16__)
#define CBGEN_BF16_DOT 1
#endif

namespace cbgen {

constexpr float kLog2E = 1.44269504088896f;
// Below every real logit. Finite, so that a row that has seen no key yet can be rescaled without inf - inf.
constexpr float kNothingSeen = -1e30f;
constexpr int kMaxDim = 256;  // of a key or a value
constexpr int kTile = 16;  // positions fetched at a time

template <class T>
struct Attention {
    const T* query;  // [T, Hq, D], strides below
    const T* keys;  // [num_blocks, Hkv, block_size, D]
    const T* values;  // [num_blocks, Hkv, block_size, Dv]
    T* out;  // [T, Hq, Dv]
    const int32_t* block_tables;  // [B, block_table_stride]
    const int32_t* cu_seqlens_q;  // [B + 1]
    const int32_t* context_lens;  // [B] positions held, those of this call included
    const float* sinks;  // [Hq] or null
    int64_t query_token_stride, query_head_stride, block_table_stride;
    int num_seqs, num_heads, num_kv_heads, key_dim, value_dim, block_size;
    float scale;
    int window;  // 0: none
    float softcap;  // 0: none

    int group() const { return num_heads / num_kv_heads; }
    int num_queries(int seq) const { return cu_seqlens_q[seq + 1] - cu_seqlens_q[seq]; }
    // The first position that a query at `position` sees.
    int first_visible(int position) const { return window ? std::max(0, position - window + 1) : 0; }
    const T* query_row(int64_t token, int head) const {
        return query + token * query_token_stride + head * query_head_stride;
    }
};

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Memory that a thread keeps between calls; carved up anew by each. Cache lines are never shared by two pieces.
class Scratch {
   public:
    void reset(size_t num_bytes) {
        if (num_bytes > capacity_) {
            std::free(memory_);
            capacity_ = (num_bytes + 4095) / 4096 * 4096;
            memory_ = static_cast<char*>(std::aligned_alloc(64, capacity_));
            if (memory_ == nullptr) std::abort();  // a few hundred kB
        }
        used_ = 0;
    }
    template <class U>
    U* take(size_t count) {
        U* piece = reinterpret_cast<U*>(memory_ + used_);
        used_ += padded<U>(count);
        return piece;
    }
    template <class U>
    static size_t padded(size_t count) {
        return (count * sizeof(U) + 63) / 64 * 64;
    }
    ~Scratch() { std::free(memory_); }

   private:
    char* memory_ = nullptr;
    size_t capacity_ = 0, used_ = 0;
};

#ifndef CBGEN_AVX512

// One register of floats as the compiler's own vector type: unlike arrays these stay in registers over a loop.
#ifdef __AVX__
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kPieces = kWidth / kLanes;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));

inline Lanes lanes_of(const float* p) {
    Lanes lanes;
    std::memcpy(&lanes, p, sizeof(lanes));
    return lanes;
}
template <class T>
inline Lanes lanes_of(const T* p) {
    Lanes lanes;
    for (int i = 0; i < kLanes; ++i) lanes[i] = to_float(p[i]);
    return lanes;
}
inline Lanes lanes_of(const Bf16* p) {
    typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
    typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
    Halves halves;
    std::memcpy(&halves, p, sizeof(halves));
    return (Lanes)(__builtin_convertvector(halves, Words) << 16);
}
// Sixteen, zeros past the first `count`.
template <class T>
inline void sixteen_of(const T* p, int count, Lanes* pieces) {
    T whole[kWidth];
    if (count < kWidth) {
        std::memset(static_cast<void*>(whole), 0, sizeof(whole));
        std::memcpy(static_cast<void*>(whole), p, count * sizeof(T));
        p = whole;
    }
    for (int i = 0; i < kPieces; ++i) pieces[i] = lanes_of(p + i * kLanes);
}

#endif

// Memory to ask for while something else is computed, a part at a time: the processor's own guesses do not follow block
// tables, and a burst of requests would stall what runs beside it.
struct Ahead {
    const char* memory = nullptr;
    int num_bytes = 0;

    // Forced inline: a function that does nothing but prefetch counts as one without effect, and its calls are dropped.
    __attribute__((always_inline)) void fetch_part(int part, int num_parts) const {
        for (int at = part * num_bytes / num_parts; at < (part + 1) * num_bytes / num_parts; at += 64)
            __builtin_prefetch(memory + at);
    }
};

// Rows of one KV head of one sequence, sixteen positions at a time.
template <class T>
class Pages {
   public:
    Pages(const T* cache, const Attention<T>& call, int seq, int kv_head, int dim)
        : cache_(cache),
          table_(call.block_tables + seq * call.block_table_stride),
          kv_head_(kv_head),
          num_kv_heads_(call.num_kv_heads),
          block_size_(call.block_size),
          dim_(dim) {}

    const T* row(int position) const {
        const int64_t block = table_[position / block_size_];
        return cache_ + ((block * num_kv_heads_ + kv_head_) * block_size_ + position % block_size_) * dim_;
    }

    // Positions [start, start + 16), start a multiple of 16, as rows of `dim`. Those outside [first, last) may never
    // have been written: they read as zeros, from `copy` (16 x dim).
    const T* tile(int start, int first, int last, T* copy) const {
        if (first <= start && start + kTile <= last && block_size_ % kTile == 0) return row(start);
        for (int i = 0; i < kTile; ++i) {
            const int position = start + i;
            if (first <= position && position < last)
                std::memcpy(copy + i * dim_, row(position), dim_ * sizeof(T));
            else
                std::memset(static_cast<void*>(copy + i * dim_), 0, dim_ * sizeof(T));
        }
        return copy;
    }

    // The tile at `start`, to be asked for early; past `last` there is none.
    Ahead ahead(int start, int last) const {
        if (start >= last) return {};
        return {reinterpret_cast<const char*>(row(start)), int(kTile * dim_ * sizeof(T))};
    }

   private:
    const T* cache_;
    const int32_t* table_;
    int kv_head_, num_kv_heads_, block_size_, dim_;
};

}  // namespace cbgen
