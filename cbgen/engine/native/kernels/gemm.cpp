// Linear layers in bfloat16 on CPUs with AVX512-BF16: y = x W^T, weights packed once, sums in float32.
//
// In:  x [M, K], a weight packed by `cbgen_pack_weight`. Out: y [M, N], or what an epilogue makes of it.
//
// Packed layout: [panels, K / 2, 32, 2]. A panel is 32 output columns; each pair of input features lies as two vectors
// of 16 columns x 2 features, which is what one dpbf16 instruction takes. Rows of x are taken up to 14 at a time: 28
// accumulators, two vectors of weights and one broadcast pair fill the 32 registers.
//
// Every output is one sum over K in one fixed order, whatever M, its place in the batch and the number of threads: a
// row's result is bitwise the same alone and in company.

#include <cstdint>
#include <cstring>

#include "vec.h"

#if defined(CBGEN_AVX512) && defined(__AVX512BF16__)
#define CBGEN_GEMM 1
#endif

namespace {

constexpr int kPanel = 32;         // output columns of a panel
constexpr int kMaxRows = 14;       // rows of x in one tile
constexpr int64_t kCache = 192 << 10;  // bytes of panels that stay in the second-level cache while rows pass by

enum Epilogue : int { kStore = 0, kAddTo = 1, kSiluMul = 2, kGeluTanhMul = 3 };

#ifdef CBGEN_GEMM

struct Job {
    const uint16_t* x;
    int64_t x_stride;
    const uint16_t* packed;
    const float* bias;  // [N] or null
    int64_t num_rows, num_columns, num_features;
    uint16_t* y;
    int64_t y_stride;
    int epilogue;
};

inline __m512 from_bf16(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// exp for arguments that are not above 88; below -87 it is 0. Degree 5 polynomial on [-ln2/2, ln2/2], error 2e-7.
inline __m512 exp_ps(__m512 x) {
    const __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.f), _CMP_LT_OQ);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, _mm512_set1_ps(1.f)));
    return _mm512_mask_blend_ps(tiny, _mm512_scalef_ps(p, n), _mm512_setzero_ps());
}

// x / (1 + exp(-a))
inline __m512 times_sigmoid(__m512 x, __m512 a) {
    const __m512 clamped = _mm512_max_ps(a, _mm512_set1_ps(-88.f));
    const __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), clamped));
    const __m512 y = _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.f), e));
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);  // max drops NaN: put it back
}

inline __m512 activate(__m512 gate, int epilogue) {
    if (epilogue == kSiluMul) return times_sigmoid(gate, gate);
    // gelu with tanh: 0.5 g (1 + tanh(u)) = g sigmoid(2u), u = sqrt(2/pi) (g + 0.044715 g^3)
    const __m512 cube = _mm512_mul_ps(gate, _mm512_mul_ps(gate, gate));
    const __m512 u = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), gate);
    return times_sigmoid(gate, _mm512_mul_ps(u, _mm512_set1_ps(1.59576912f)));
}

inline void store_bf16(uint16_t* out, __mmask16 mask, __m512 values) {
    _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

inline __mmask16 first(int64_t count) {
    return count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}

// The sums of one row over one panel become outputs.
inline void finish(const Job& job, int64_t row, int64_t panel, __m512 low, __m512 high) {
    const int64_t column = panel * kPanel;
    const __mmask16 low_mask = first(job.num_columns - column), high_mask = first(job.num_columns - column - 16);
    if (job.bias) {
        low = _mm512_add_ps(low, _mm512_maskz_loadu_ps(low_mask, job.bias + column));
        high = _mm512_add_ps(high, _mm512_maskz_loadu_ps(high_mask, job.bias + column + 16));
    }
    if (job.epilogue >= kSiluMul) {  // the panel holds 16 columns of the gate, then the same 16 of what it multiplies
        store_bf16(job.y + row * job.y_stride + panel * 16, 0xffff, _mm512_mul_ps(activate(low, job.epilogue), high));
        return;
    }
    uint16_t* y = job.y + row * job.y_stride + column;
    if (job.epilogue == kAddTo) {
        low = _mm512_add_ps(low, from_bf16(_mm256_maskz_loadu_epi16(low_mask, y)));
        high = _mm512_add_ps(high, from_bf16(_mm256_maskz_loadu_epi16(high_mask, y + 16)));
    }
    store_bf16(y, low_mask, low);
    if (high_mask) store_bf16(y + 16, high_mask, high);
}

// `Rows` rows of x against one panel. Meanwhile the lines from `ahead` on, `Lines` per pair of features, are fetched for
// later: no prefetcher of a CPU knows which panel comes after the rows have passed.
template <int Rows, int Lines>
void tile(const Job& job, int64_t row, int64_t panel, const char* ahead) {
    const int64_t pairs = job.num_features / 2;
    const uint16_t* w = job.packed + panel * pairs * (2 * kPanel);
    const uint16_t* x = job.x + row * job.x_stride;
    __m512 low[Rows], high[Rows];
#pragma GCC unroll 14
    for (int r = 0; r < Rows; r++) low[r] = high[r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k++) {
        const __m512bh w_low = (__m512bh)_mm512_loadu_si512(w + k * 64);
        const __m512bh w_high = (__m512bh)_mm512_loadu_si512(w + k * 64 + 32);
        _mm_prefetch(ahead + k * Lines * 64, _MM_HINT_T1);
        if (Lines > 1) _mm_prefetch(ahead + k * Lines * 64 + 64, _MM_HINT_T1);
#pragma GCC unroll 14
        for (int r = 0; r < Rows; r++) {
            int32_t pair;
            std::memcpy(&pair, x + r * job.x_stride + 2 * k, 4);
            const __m512bh broadcast = (__m512bh)_mm512_set1_epi32(pair);
            low[r] = _mm512_dpbf16_ps(low[r], broadcast, w_low);
            high[r] = _mm512_dpbf16_ps(high[r], broadcast, w_high);
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < Rows; r++) finish(job, row + r, panel, low[r], high[r]);
}

using Tile = void (*)(const Job&, int64_t, int64_t, const char*);
template <int Lines>
constexpr Tile kTiles[kMaxRows + 1] = {
    nullptr,         tile<1, Lines>,  tile<2, Lines>,  tile<3, Lines>,  tile<4, Lines>,
    tile<5, Lines>,  tile<6, Lines>,  tile<7, Lines>,  tile<8, Lines>,  tile<9, Lines>,
    tile<10, Lines>, tile<11, Lines>, tile<12, Lines>, tile<13, Lines>, tile<14, Lines>,
};

// Rows begin..end against panels first..last; few panels at a time, so that they stay in cache while all rows pass.
void block(const Job& job, int64_t begin, int64_t end, int64_t first_panel, int64_t last_panel) {
    const int64_t num_tiles = (end - begin + kMaxRows - 1) / kMaxRows;
    const int64_t panel_bytes = job.num_features * kPanel * 2;
    int64_t group = kCache / panel_bytes;
    group = group < 1 || num_tiles == 1 ? 1 : group;
    for (int64_t start = first_panel; start < last_panel; start += group) {
        const int64_t stop = start + group < last_panel ? start + group : last_panel;
        for (int64_t t = 0; t < num_tiles; t++) {  // tiles as even as they can be
            const int64_t row = begin + (end - begin) * t / num_tiles;
            const int64_t next = begin + (end - begin) * (t + 1) / num_tiles;
            for (int64_t panel = start; panel < stop; panel++) {
                // Each tile fetches its share of the panel that takes this one's place.
                const char* ahead = (const char*)job.packed + (panel + group) * panel_bytes;
                if (num_tiles == 1) {
                    kTiles<2>[next - row](job, row, panel, ahead);
                } else {
                    kTiles<1>[next - row](job, row, panel, ahead + panel_bytes / num_tiles * t / 64 * 64);
                }
            }
        }
    }
}

void run(const Job& job, int num_threads) {
    const int64_t panels = (job.num_columns + kPanel - 1) / kPanel;
    // Threads share the panels; where there are too few of them for that, the rows as well.
    int64_t across = num_threads < panels ? num_threads : panels;
    int64_t down = num_threads / across;
    const int64_t most = (job.num_rows + kMaxRows - 1) / kMaxRows;
    down = down < most ? down : most;
#pragma omp parallel for num_threads(across * down) schedule(static) if (across * down > 1)
    for (int64_t part = 0; part < across * down; part++) {
        const int64_t a = part % across, d = part / across;
        block(job, job.num_rows * d / down, job.num_rows * (d + 1) / down, panels * a / across,
              panels * (a + 1) / across);
    }
}

#endif  // CBGEN_GEMM

}  // namespace

// 1 when this build has the kernel.
CBGEN_EXPORT int cbgen_has_linear() {
#ifdef CBGEN_GEMM
    return 1;
#else
    return 0;
#endif
}

// Bytes of a packed weight [num_columns, num_features].
CBGEN_EXPORT int64_t cbgen_packed_bytes(int64_t num_columns, int64_t num_features) {
    return (num_columns + kPanel - 1) / kPanel * kPanel * num_features * 2;
}

// weight [num_columns, num_features] bfloat16 -> packed. num_features must be even.
CBGEN_EXPORT void cbgen_pack_weight(const uint16_t* weight, int64_t stride, int64_t num_columns, int64_t num_features,
                                    uint16_t* packed, int num_threads) {
    const int64_t panels = (num_columns + kPanel - 1) / kPanel, pairs = num_features / 2;
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1)
    for (int64_t panel = 0; panel < panels; panel++) {
        uint16_t* out = packed + panel * pairs * 2 * kPanel;
        const int64_t column = panel * kPanel;
        const int64_t count = num_columns - column < kPanel ? num_columns - column : kPanel;
        if (count < kPanel) std::memset(out, 0, pairs * 2 * kPanel * 2);
        for (int64_t k = 0; k < pairs; k++) {  // columns inside: what is written is then written in order
            for (int64_t c = 0; c < count; c++) {
                std::memcpy(out + k * 2 * kPanel + 2 * c, weight + (column + c) * stride + 2 * k, 4);
            }
        }
    }
}

// y [M, N] = x [M, K] W^T + bias, then the epilogue: 0 store; 1 add to what y holds; 2, 3 activation of the gate times
// the rest (silu, gelu with tanh), where W alternates 16 rows of the gate and 16 of the rest, and y is [M, N / 2].
CBGEN_EXPORT void cbgen_linear(const uint16_t* x, int64_t x_stride, const uint16_t* packed, const float* bias,
                               int64_t num_rows, int64_t num_columns, int64_t num_features, uint16_t* y,
                               int64_t y_stride, int epilogue, int num_threads) {
#ifdef CBGEN_GEMM
    if (num_rows > 0) {
        run({x, x_stride, packed, bias, num_rows, num_columns, num_features, y, y_stride, epilogue}, num_threads);
    }
#endif
}
