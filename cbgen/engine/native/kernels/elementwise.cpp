// The small operators of a layer.
#include "vec.h"

using namespace cbgen;

namespace {

template <class From, class To>
void cast_row(const From* x, To* y, int64_t n) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) store(y + i, load(x + i));
    if (i < n) store_first(y + i, load_first(x + i, int(n - i)), int(n - i));
}

}  // namespace

// y[n] = x[n] in another element type.
CBGEN_EXPORT void cbgen_cast(const void* x, int from, void* y, int to, int64_t n, int num_threads) {
    constexpr int64_t chunk = 1 << 14;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && n > 2 * chunk) schedule(static)
    for (int64_t start = 0; start < n; start += chunk) {
        const int64_t count = n - start < chunk ? n - start : chunk;
        dispatch(from, [&](auto f) {
            using From = typename decltype(f)::type;
            dispatch(to, [&](auto t) {
                using To = typename decltype(t)::type;
                cast_row(static_cast<const From*>(x) + start, static_cast<To*>(y) + start, count);
            });
        });
    }
}
