// Attention of one layer over one packed step: decodes and prefill chunks, against the paged cache, in one call.
//
// The step becomes a list of work items (see attention_decode.h and attention_prefill.h), each with an estimate of its
// cost; threads fetch runs of items of about equal cost. Who computes an item never changes what it computes.
#include <atomic>
#include <vector>

#include "attention_decode.h"
#include "attention_prefill.h"

namespace cbgen {
namespace {

constexpr int kRunsPerThread = 8;
constexpr int64_t kCostPerThread = 20000;  // below, starting a thread costs more than it saves; about cycles

struct Item {
    Stretch stretch;  // of a decode: positions of one split; of a prefill: tokens of one tile
    bool is_decode;
    int64_t partial;  // where one of several splits leaves its sums, in units of G heads; -1 for an only one
};

// A sequence that was split: its partial sums lie [Hkv][num_splits][G] from `partial` on.
struct Join {
    int32_t seq, num_splits;
    int64_t partial;
};

struct Plan {
    std::vector<Item> items;
    std::vector<int64_t> cost_before;  // per item, of all items before it
    std::vector<Join> joins;
    std::vector<size_t> runs;  // run r is items [runs[r], runs[r + 1])
    int64_t cost = 0, num_partials = 0;

    void clear() {
        items.clear(), cost_before.clear(), joins.clear(), runs.clear();
        cost = num_partials = 0;
    }
    void add(const Item& item, int64_t item_cost) {
        items.push_back(item);
        cost_before.push_back(cost);
        cost += item_cost;
    }
};

template <class T>
void plan_decode(Plan& plan, const Attention<T>& call, int seq) {
    const int held = call.context_lens[seq], begin = call.first_visible(held - 1);
    const int first = begin / kSplit, num_splits = (held - 1) / kSplit - first + 1;
    if (num_splits > 1) plan.joins.push_back({seq, num_splits, plan.num_partials});
    for (int kv_head = 0; kv_head < call.num_kv_heads; ++kv_head)
        for (int split = 0; split < num_splits; ++split) {
            const int from = std::max(begin, (first + split) * kSplit);
            const int to = std::min(held, (first + split + 1) * kSplit);
            const int64_t partial = num_splits > 1 ? plan.num_partials++ : -1;
            // Bound by memory at about 6 bytes a cycle, or by arithmetic when many heads share the key.
            const int64_t row_cost = int64_t(call.key_dim + call.value_dim) * (sizeof(T) * 2 + call.group() / 4) / 12;
            plan.add({{seq, kv_head, from, to}, true, partial}, 100 + (to - from) * row_cost);
        }
}

template <class T>
void plan_prefill(Plan& plan, const Attention<T>& call, int seq) {
    const int num_queries = call.num_queries(seq), step = tokens_per_tile(call.group());
    const int before = call.context_lens[seq] - num_queries;
    for (int kv_head = 0; kv_head < call.num_kv_heads; ++kv_head)
        for (int token = 0; token < num_queries; token += step) {
            const int stop = std::min(num_queries, token + step);
            const int64_t seen = before + stop - call.first_visible(before + token);
            const int64_t pair_cost = int64_t(call.key_dim + call.value_dim) * sizeof(T) / 2;  // in 1/32 cycles
            const int64_t rows = int64_t(stop - token) * call.group();
            plan.add({{seq, kv_head, token, stop}, false, -1}, 100 + rows * seen * pair_cost / 32);
        }
}

template <class T>
void make_plan(Plan& plan, const Attention<T>& call, int num_decodes, int num_threads) {
    plan.clear();
    for (int seq = num_decodes; seq < call.num_seqs; ++seq)  // first the large items, so that small ones fill the end
        if (call.num_queries(seq) > 0) plan_prefill(plan, call, seq);
    for (int seq = 0; seq < num_decodes; ++seq) plan_decode(plan, call, seq);
    const int num_runs = num_threads * kRunsPerThread;
    size_t item = 0;
    for (int run = 0; run < num_runs; ++run) {
        while (item < plan.items.size() && plan.cost_before[item] < plan.cost * run / num_runs) ++item;
        plan.runs.push_back(item);
    }
    plan.runs.push_back(plan.items.size());
}

// Partial sums of split decodes: [num_partials, G] and [num_partials, G, stride].
struct Partials {
    float *largest, *total, *sums;
    int group, stride;

    Partials(Scratch& scratch, int64_t count, int group, int stride) : group(group), stride(stride) {
        const size_t heads = size_t(count) * group;
        scratch.reset(2 * Scratch::padded<float>(heads) + Scratch::padded<float>(heads * stride));
        largest = scratch.take<float>(heads);
        total = scratch.take<float>(heads);
        sums = scratch.take<float>(heads * stride);
    }
};

// Items [first, last) in their order.
template <class T>
void run_items(const Attention<T>& call, const Item* first, const Item* last, const Partials& partials) {
    static thread_local Scratch scratch, own_sums;
    for (const Item* item = first; item < last; ++item) {
        const Stretch& part = item->stretch;
        if (!item->is_decode) {
            prefill_tile(call, scratch, part.seq, part.kv_head, part.begin, part.end - part.begin);
            continue;
        }
        const bool whole = item->partial < 0;
        const Partials to = whole ? Partials(own_sums, 1, partials.group, partials.stride) : partials;
        const size_t head = whole ? 0 : size_t(item->partial) * partials.group;
        decode_stretch(call, scratch, part, item + 1 < last ? &item[1].stretch : nullptr,
                       item == first || !item[-1].is_decode, to.largest + head, to.total + head,
                       to.sums + head * to.stride, to.stride);
        for (int h = 0; whole && h < to.group; ++h)
            write_head(call, call.cu_seqlens_q[part.seq], part.kv_head * to.group + h, 1, [&](int) {
                return Partial{to.largest[h], to.total[h], to.sums + size_t(h) * to.stride};
            });
    }
}

template <class T>
void join_splits(const Attention<T>& call, const Join& join, int head, const Partials& partials) {
    const int group = partials.group;
    const size_t first = (size_t(join.partial) + size_t(head / group) * join.num_splits) * group + head % group;
    write_head(call, call.cu_seqlens_q[join.seq], head, join.num_splits, [&](int split) {
        const size_t at = first + size_t(split) * group;
        return Partial{partials.largest[at], partials.total[at], partials.sums + at * partials.stride};
    });
}

template <class T>
void attention(const Attention<T>& call, int num_decodes, int num_threads) {
    static thread_local Plan plan_memory;
    static thread_local Scratch partials_memory;
    Plan& plan = plan_memory;  // of this thread, also inside the parallel region
    make_plan(plan, call, num_decodes, num_threads);
    const Partials partials(partials_memory, plan.num_partials, call.group(), round_up(call.value_dim, 32));
    std::atomic<size_t> next_run{0};
    const int threads = int(std::min<int64_t>(num_threads, 1 + plan.cost / kCostPerThread));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        for (size_t run; (run = next_run.fetch_add(1, std::memory_order_relaxed)) + 1 < plan.runs.size();)
            run_items(call, plan.items.data() + plan.runs[run], plan.items.data() + plan.runs[run + 1], partials);
        if (!plan.joins.empty()) {
#pragma omp barrier
#pragma omp for schedule(static) collapse(2)
            for (size_t i = 0; i < plan.joins.size(); ++i)
                for (int head = 0; head < call.num_heads; ++head) join_splits(call, plan.joins[i], head, partials);
        }
    }
}

}  // namespace
}  // namespace cbgen

// See `Attention` for the shapes. The first `num_decodes` sequences have exactly one token in the step; every sequence
// holds at least as many positions as it has tokens. `sinks` may be null.
CBGEN_EXPORT void cbgen_attention(
    const void* query, const void* keys, const void* values, void* out, const int32_t* block_tables,
    const int32_t* cu_seqlens_q, const int32_t* context_lens, const float* sinks, int64_t query_token_stride,
    int64_t query_head_stride, int64_t block_table_stride, int num_seqs, int num_decodes, int num_heads,
    int num_kv_heads, int key_dim, int value_dim, int block_size, float scale, int window, float softcap, int dtype,
    int num_threads) {
    cbgen::dispatch(dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        const cbgen::Attention<T> call{
            static_cast<const T*>(query), static_cast<const T*>(keys), static_cast<const T*>(values),
            static_cast<T*>(out), block_tables, cu_seqlens_q, context_lens, sinks, query_token_stride,
            query_head_stride, block_table_stride, num_seqs, num_heads, num_kv_heads, key_dim, value_dim, block_size,
            scale, window, softcap};
        cbgen::attention(call, num_decodes, num_threads);
    });
}
