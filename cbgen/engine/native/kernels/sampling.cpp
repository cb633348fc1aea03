// Choosing tokens: the most likely one, or a draw from a truncated distribution.
//
// A row of logits is walked in blocks whose maxima tell which blocks can be skipped later. What truncation may keep is
// collected as candidates in the order of ids; usually that is a few hundred of a hundred thousand, and no sort of
// the vocabulary is ever made. Weights are float, their sums double, in a fixed order.
#include <algorithm>
#include <functional>
#include <vector>

#include "vec.h"

using namespace cbgen;

namespace {

constexpr int64_t kBlock = 64;         // elements per block maximum
constexpr int64_t kSearchBlock = 512;  // the same where only the best is looked for
constexpr int64_t kSumBlock = 1024;
constexpr int kMaxParts = 256;
constexpr float kInfinity = __builtin_huge_valf();

// -- the most likely token --------------------------------------------------------------------------------------------

struct Best {
    float value = -kInfinity;
    int64_t id = -1;
    bool has_nan = false;
};

// The first of the largest among x[begin..end).
template <class T>
Best best_of(const T* x, int64_t begin, int64_t end) {
    Best best;
    int64_t best_block = begin;
    for (int64_t start = begin; start < end; start += kSearchBlock) {
        const int64_t stop = std::min(start + kSearchBlock, end);
        Vec largest(-kInfinity), other(-kInfinity);
        bool has_nan = false;
        int64_t i = start;
        for (; i + 2 * kWidth <= stop; i += 2 * kWidth) {
            const Vec a = load(x + i), b = load(x + i + kWidth);
            has_nan |= any_nan(a + b) && (any_nan(a) || any_nan(b));  // +inf and -inf also make a NaN
            largest = max(largest, a);
            other = max(other, b);
        }
        float value = max_of(max(largest, other));
        for (; i < stop; ++i) {
            const float a = to_float(x[i]);
            has_nan |= a != a;
            value = a > value ? a : value;
        }
        best.has_nan |= has_nan;
        if (value > best.value) {
            best.value = value;
            best_block = start;
        }
    }
    for (int64_t i = best_block; i < end && best.id < 0; ++i)
        if (to_float(x[i]) == best.value) best.id = i;
    return best;
}

inline bool is_sound(const Best& best) { return !best.has_nan && best.value < kInfinity && best.value > -kInfinity; }

Best better_of(const Best& first, const Best& second) {
    Best best = second.value > first.value ? second : first;
    best.has_nan = first.has_nan || second.has_nan;
    return best;
}

// -- truncation -------------------------------------------------------------------------------------------------------

struct Candidate {
    float logit;  // less the row's maximum, over the temperature: 0 for the likeliest
    int32_t id;
};

struct Weighted {
    float logit, weight;
};

// What one thread needs for a row; kept from call to call.
struct Scratch {
    std::vector<float> logits, weights, maxima, values;
    std::vector<double> sums;
    std::vector<Candidate> candidates;
    std::vector<Weighted> weighted;
};

inline float weight_of(float logit) {
    float lanes[kWidth];
    store(lanes, exp(Vec(logit)));
    return lanes[0];
}

// logits = (x - largest) / temperature, and their maxima by blocks.
template <class T>
void scale_row(const T* x, int64_t n, float largest, float temperature, Scratch& scratch) {
    scratch.logits.resize(n + kWidth);
    scratch.maxima.resize((n + kBlock - 1) / kBlock);
    float* logits = scratch.logits.data();
    for (int64_t start = 0; start < n; start += kBlock) {
        const int64_t stop = std::min(start + kBlock, n);
        Vec most(-kInfinity);
        int64_t i = start;
        for (; i + kWidth <= stop; i += kWidth) {
            const Vec a = (load(x + i) - Vec(largest)) / Vec(temperature);
            store(logits + i, a);
            most = max(most, a);
        }
        float value = max_of(most);
        for (; i < stop; ++i) {
            logits[i] = (to_float(x[i]) - largest) / temperature;
            value = logits[i] > value ? logits[i] : value;
        }
        scratch.maxima[start / kBlock] = value;
    }
}

// Weights of all logits, their sums by blocks, and the sum of these.
double weigh_row(int64_t n, Scratch& scratch) {
    scratch.weights.resize(n + kWidth);
    scratch.sums.clear();
    float *logits = scratch.logits.data(), *weights = scratch.weights.data();
    for (int i = 0; i < kWidth; ++i) logits[n + i] = -kInfinity;  // of weight 0
    double total = 0;
    for (int64_t start = 0; start < n; start += kSumBlock) {
        const int64_t stop = std::min(start + kSumBlock, n);
        double lanes[kWidth] = {};
        for (int64_t i = start; i < stop; i += kWidth) {
            store(weights + i, exp(load(logits + i)));
            for (int j = 0; j < kWidth; ++j) lanes[j] += weights[i + j];
        }
        double sum = 0;
        for (int j = 0; j < kWidth; ++j) sum += lanes[j];
        scratch.sums.push_back(sum);
        total += sum;
    }
    return total;
}

// Candidates become all tokens whose logit is at least `cutoff`, by id.
void collect(int64_t n, float cutoff, Scratch& scratch) {
    scratch.candidates.clear();
    const float* logits = scratch.logits.data();
    for (int64_t start = 0; start < n; start += kBlock) {
        if (scratch.maxima[start / kBlock] < cutoff) continue;
        const int64_t stop = std::min(start + kBlock, n);
        for (int64_t i = start; i < stop; ++i)
            if (logits[i] >= cutoff) scratch.candidates.push_back({logits[i], int32_t(i)});
    }
}

// Keep the candidates above the threshold, and the first `room` of those at it.
void keep_likeliest(float threshold, int64_t room, std::vector<Candidate>& candidates) {
    auto dropped = [&](const Candidate& c) { return c.logit < threshold || (c.logit == threshold && room-- <= 0); };
    size_t kept = 0;
    for (const Candidate& candidate : candidates)
        if (!dropped(candidate)) candidates[kept++] = candidate;
    candidates.resize(kept);
}

// Candidates become the k likeliest of the row. The k-th largest block maximum is a lower bound of the k-th logit.
void take_top_k(int64_t n, int64_t k, Scratch& scratch) {
    std::vector<float>& values = scratch.values;
    float cutoff = -kInfinity;
    if (k <= int64_t(scratch.maxima.size())) {
        values = scratch.maxima;
        std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
        cutoff = values[k - 1];
    }
    collect(n, cutoff, scratch);
    values.clear();
    for (const Candidate& candidate : scratch.candidates) values.push_back(candidate.logit);
    std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
    const float threshold = values[k - 1];
    const int64_t above = std::count_if(values.begin(), values.end(), [&](float v) { return v > threshold; });
    keep_likeliest(threshold, k - above, scratch.candidates);
}

float median(float a, float b, float c) { return std::max(std::min(a, b), std::min(std::max(a, b), c)); }

// Of the candidates keep the likeliest that together reach `wanted`, at least one. A quickselect by weight: the range
// of the last kept one is cut around a pivot until it is the pivot.
void take_nucleus(double wanted, Scratch& scratch) {
    std::vector<Weighted>& items = scratch.weighted;
    items.clear();
    for (const Candidate& candidate : scratch.candidates) items.push_back({candidate.logit, weight_of(candidate.logit)});
    Weighted *begin = items.data(), *end = begin + items.size();
    double before = 0;  // weight of all that is likelier than the range
    while (begin < end) {
        const float pivot = median(begin->logit, begin[(end - begin) / 2].logit, end[-1].logit);
        Weighted* equal = std::partition(begin, end, [&](const Weighted& w) { return w.logit > pivot; });
        Weighted* less = std::partition(equal, end, [&](const Weighted& w) { return w.logit == pivot; });
        double above = before;
        for (Weighted* item = begin; item < equal; ++item) above += item->weight;
        if (above >= wanted && begin < equal) {
            end = equal;
            continue;
        }
        const double weight = equal->weight;
        if (above + double(less - equal) * weight < wanted && less < end) {
            before = above + double(less - equal) * weight;
            begin = less;
            continue;
        }
        int64_t room = 1;
        while (room < less - equal && above + double(room) * weight < wanted) ++room;
        keep_likeliest(pivot, room, scratch.candidates);
        return;
    }
}

// -- the draw ---------------------------------------------------------------------------------------------------------

// What the cumulative weight must pass. Rounding must not take it past the end.
inline double target_of(double uniform, double total) { return std::min(uniform * total, std::nextafter(total, 0.0)); }

int64_t draw_candidate(double uniform, const std::vector<Candidate>& candidates) {
    double total = 0, cumulative = 0;
    for (const Candidate& candidate : candidates) total += weight_of(candidate.logit);
    const double target = target_of(uniform, total);
    for (const Candidate& candidate : candidates) {
        cumulative += weight_of(candidate.logit);
        if (cumulative > target) return candidate.id;
    }
    return 0;
}

int64_t draw_from_all(double uniform, int64_t n, double total, const Scratch& scratch) {
    const double target = target_of(uniform, total);
    double cumulative = 0;
    int64_t i = 0, last = 0;
    for (size_t block = 0; block + 1 < scratch.sums.size() && cumulative + scratch.sums[block] <= target; ++block) {
        cumulative += scratch.sums[block];
        i += kSumBlock;
    }
    for (; i < n; ++i) {
        cumulative += scratch.weights[i];
        if (cumulative > target) return i;
        if (scratch.weights[i] > 0) last = i;
    }
    return last;  // the block's sum was rounded up, its elements' was not
}

struct Truncation {
    float temperature;
    int64_t top_k;  // 0 for all
    float top_p;
    float log_min_p;  // -inf for all
};

template <class T>
int64_t draw_row(const T* x, int64_t n, const Truncation& truncation, double uniform, Scratch& scratch) {
    const Best best = best_of(x, 0, n);
    if (!is_sound(best)) return 0;
    scale_row(x, n, best.value, truncation.temperature, scratch);
    const bool by_k = truncation.top_k > 0 && truncation.top_k < n, by_p = truncation.top_p < 1;
    const bool by_min_p = truncation.log_min_p > -kInfinity;
    if (!by_k && !by_p && !by_min_p) return draw_from_all(uniform, n, weigh_row(n, scratch), scratch);

    std::vector<Candidate>& candidates = scratch.candidates;
    double total = -1;  // weight of all that top-p chooses from
    if (by_k) {
        take_top_k(n, truncation.top_k, scratch);
        if (by_min_p) keep_likeliest(truncation.log_min_p, n, candidates);
    } else if (by_min_p) {
        collect(n, truncation.log_min_p, scratch);
    } else {
        // All tokens lighter than (1 - top_p) / n of the total weigh less than 1 - top_p together: outside the nucleus.
        total = weigh_row(n, scratch);
        const double lightest = (1.0 - double(truncation.top_p)) * total / double(n);
        collect(n, float(std::log(lightest)) - 1e-3f, scratch);
    }
    if (by_p) {
        if (total < 0) {
            total = 0;
            for (const Candidate& candidate : candidates) total += weight_of(candidate.logit);
        }
        take_nucleus(double(truncation.top_p) * total, scratch);
    }
    return draw_candidate(uniform, candidates);
}

}  // namespace

// ids[S]: the lowest id of the maximum of each row of logits [S, vocab_size], -1 where a row is not sound.
CBGEN_EXPORT void cbgen_argmax(const void* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                               int64_t* ids, int dtype, int num_threads) {
    const int64_t wanted = num_rows < num_threads ? num_threads : 1;
    const int64_t num_parts = std::max<int64_t>(1, std::min<int64_t>(wanted, kMaxParts / std::max<int64_t>(num_rows, 1)));
    const int64_t part_size = (vocab_size + num_parts - 1) / num_parts;
    Best parts[kMaxParts];
    dispatch(dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
#pragma omp parallel for num_threads(num_threads) if (num_rows * vocab_size > 1 << 15) schedule(static)
        for (int64_t item = 0; item < num_rows * num_parts; ++item) {
            const int64_t row = item / num_parts, begin = item % num_parts * part_size;
            const int64_t end = std::min(begin + part_size, vocab_size);
            const Best best = best_of(static_cast<const T*>(logits) + row * row_stride, begin, std::max(begin, end));
            if (num_parts == 1)
                ids[row] = is_sound(best) ? best.id : -1;
            else
                parts[item] = best;
        }
    });
    for (int64_t row = 0; num_parts > 1 && row < num_rows; ++row) {
        Best best = parts[row * num_parts];
        for (int64_t part = 1; part < num_parts; ++part) best = better_of(best, parts[row * num_parts + part]);
        ids[row] = is_sound(best) ? best.id : -1;
    }
}

// ids[R]: a draw from rows[R] of logits [S, vocab_size], with temperature, top_k, top_p, log(min_p) and uniform [R].
CBGEN_EXPORT void cbgen_draw(const void* logits, int64_t row_stride, int64_t vocab_size, const int64_t* rows,
                             int64_t num_rows, const float* temperature, const int32_t* top_k, const float* top_p,
                             const float* log_min_p, const double* uniforms, int64_t* ids, int dtype,
                             int num_threads) {
    dispatch(dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
#pragma omp parallel num_threads(num_threads) if (num_rows > 1)
        {
            static thread_local Scratch scratch;
#pragma omp for schedule(static, 1)
            for (int64_t i = 0; i < num_rows; ++i) {
                const Truncation truncation{temperature[i], top_k[i], top_p[i], log_min_p[i]};
                const T* row = static_cast<const T*>(logits) + rows[i] * row_stride;
                ids[i] = draw_row(row, vocab_size, truncation, uniforms[i], scratch);
            }
        }
    });
}
