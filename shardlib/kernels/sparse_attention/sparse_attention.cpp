// Block-sparse attention on the CPU; see __init__.py for the mathematics. Compiled once per instruction set (ISA names it).
//
// A tile of 16 queries visits the keys of its blocks, 128 at a time, by the online softmax: it computes their scores, a new
// maximum and weights, and adds weighted values to the result. Of the scores only the log-sum-exp is stored. Backward visits
// the same keys and computes the weights again; one thread sums the gradients of the keys and values of a head over all
// queries, or over one split of them, so that no two threads write to the same address.
#include "scores.h"

namespace {

constexpr int64_t CHUNK = 1024;  // queries of one item of work, forward

// Buffers for one head's matrices, per thread: factors [threads, 3, padded, size]; sums [threads, 2, padded, size], or null
// where sums go to the results directly; done [threads, 4, panels], whether a panel of the factors and of the sums exists.
struct Scratch {
    float *factors, *sums;
    uint8_t* done;
    int threads;
};

// The state of one thread: `keys` and (backward) `values` for products that sum over columns; `rows`, of values or (backward)
// of keys, for products that sum over rows; (backward) sums; a tile.
template <typename Type>
struct Thread {
    typedef Products<Type> P;
    typedef typename P::Held Held;
    // Weights are stored over the scores that they are computed from, row by row.
    static constexpr int ROW = SCORES * sizeof(float) / sizeof(Held);

    typename P::Setup setup;
    Source<Type, true> keys, values;
    Source<Type, false> rows;
    KeySums sums;
    typename P::Factor queries, grads;
    alignas(64) float out[TILE * LARGEST], scores[TILE * SCORES], dweights[TILE * SCORES];
    Held *const weights = reinterpret_cast<Held*>(scores), *const dscores = reinterpret_cast<Held*>(dweights);

    Thread(const Problem& p, const Scratch& scratch, int64_t number)
        : Thread(p, scratch.factors + 3 * number * p.padded * p.size,
                 scratch.sums ? scratch.sums + 2 * number * p.padded * p.size : nullptr,
                 scratch.done + 4 * number * (p.padded / TILE), p.padded * p.size, p.padded / TILE) {}

   private:
    Thread(const Problem& p, float* factors, float* summed, uint8_t* done, int64_t matrix, int64_t panels)
        : keys(reinterpret_cast<Held*>(factors), done, p),
          values(reinterpret_cast<Held*>(factors + matrix), done + panels, p),
          rows(reinterpret_cast<Held*>(factors + 2 * matrix), done + 2 * panels, p),
          sums(summed, done + 3 * panels, p) {}
};

inline void scale_rows(float* rows, int64_t size, const float* factors) {
    for (int i = 0; i < TILE; ++i)
        for (int64_t d = i * size; d < (i + 1) * size; d += W) store(rows + d, load<Floats>(rows + d) * all(factors[i]));
}

template <typename Type>
inline void put(const float* from, int64_t size, float factor, typename Type::Element* into) {
    for (int64_t d = 0; d < size; d += W) Type::store(into + d, load<Floats>(from + d) * all(factor));
}

template <typename Type>
void forward_tile(const Problem& p, const Tile& tile, const typename Type::Element* q, typename Type::Element* out,
                  float* lse, Thread<Type>& thread) {
    typedef Products<Type> P;
    constexpr int ROW = Thread<Type>::ROW;
    prefetch_next(q, p.size);
    thread.queries.read(q, p.size);
    memset(thread.out, 0, size_t(TILE * p.size) * sizeof(float));
    float most[TILE], maxima[TILE], subtract[TILE], factors[TILE], sums[TILE];
    Floats highest[TILE], totals[TILE] = {};  // to be reduced over lanes
    for (int i = 0; i < TILE; ++i) most[i] = -__builtin_inff();
    Panels panels(p, tile);
    int64_t at[GROUP];
    const typename P::Held *keys[GROUP], *values[GROUP];
    while (int count = panels.next(at)) {
        for (int panel = 0; panel < count; ++panel) {
            keys[panel] = thread.keys.panel(at[panel]);
            values[panel] = thread.rows.panel(at[panel]);
        }
        P::dots(thread.queries, keys, count, p.size, thread.scores);
        for (int i = 0; i < TILE; ++i) {
            highest[i] = all(most[i]);
            for (unsigned j = 0; j < unsigned(count * TILE); j += W) {
                float* score_at = thread.scores + i * SCORES + j;
                Floats score = seen(p, tile, tile.query + i, at[j / TILE] + j % TILE, load<Floats>(score_at));
                highest[i] = score > highest[i] ? score : highest[i];
                store(score_at, score);
            }
        }
        fold(highest, maxima, [](Floats a, Floats b) { return a > b ? a : b; });
        for (int i = 0; i < TILE; i += W) {
            Floats now = load<Floats>(maxima + i);
            // Until a key has been seen, 0 is subtracted: −∞ − (−∞) would be NaN.
            Floats less = now == all(-__builtin_inff()) ? Floats{} : now;
            store(subtract + i, less);
            store(factors + i, exp2(load<Floats>(most + i) - less));
            store(most + i, now);
        }
        for (int i = 0; i < TILE; ++i) {
            Floats total = totals[i] * all(factors[i]);
            for (unsigned j = 0; j < unsigned(count * TILE); j += W) {
                Floats weight = exp2(load<Floats>(thread.scores + i * SCORES + j) - all(subtract[i]));
                total += weight;
                if (p.threshold) weight *= dropout(p, tile, tile.query + i, at[j / TILE] + j % TILE);
                P::Weights::store(thread.weights + i * ROW + j, weight);
            }
            totals[i] = total;
        }
        scale_rows(thread.out, p.size, factors);
        P::add(thread.weights, values, count, p.size, thread.out);
    }
    fold(totals, sums, [](Floats a, Floats b) { return a + b; });
    for (int i = 0; i < TILE; ++i) {
        float total = sums[i];
        put<Type>(thread.out + i * p.size, p.size, total == 0 ? 0 : 1 / total, out + i * p.size);
        lse[i] = total == 0 ? -__builtin_inff() : most[i] * LN2 + __builtin_logf(total);
    }
}

template <typename Type>
struct Gradients {
    const typename Type::Element *grad, *q, *out;
    const float* lse;
    typename Type::Element* dq;
    float* dbias;  // one head's, or null where there is no bias
};

// Computes the gradients of a tile's queries, and adds to those of the head's keys and values and of the bias.
template <typename Type>
void backward_tile(const Problem& p, const Tile& tile, const Gradients<Type>& g, Thread<Type>& thread) {
    typedef Products<Type> P;
    constexpr int ROW = Thread<Type>::ROW;
    prefetch_next(g.q, p.size);
    prefetch_next(g.grad, p.size);
    prefetch_next(g.out, p.size);
    thread.queries.read(g.q, p.size);
    thread.grads.read(g.grad, p.size);
    memset(thread.out, 0, size_t(TILE * p.size) * sizeof(float));
    float inner[TILE], lse[TILE];
    Floats products[TILE] = {};
    for (int i = 0; i < TILE; ++i) {
        for (int64_t d = i * p.size; d < (i + 1) * p.size; d += W)
            products[i] = fma(Type::load(g.grad + d), Type::load(g.out + d), products[i]);
        // A query that sees no key: every weight is 2^−∞.
        lse[i] = g.lse[i] == -__builtin_inff() ? __builtin_inff() : g.lse[i] * LOG2E;
    }
    fold(products, inner, [](Floats a, Floats b) { return a + b; });
    const typename P::Held *queries = thread.queries.right(p.size), *grads = thread.grads.right(p.size);
    Panels panels(p, tile);
    int64_t at[GROUP];
    const typename P::Held *keys[GROUP], *values[GROUP], *rows[GROUP];
    while (int count = panels.next(at)) {
        for (int panel = 0; panel < count; ++panel) {
            keys[panel] = thread.keys.panel(at[panel]);
            values[panel] = thread.values.panel(at[panel]);
            rows[panel] = thread.rows.panel(at[panel]);
            thread.sums.ready(at[panel]);
        }
        P::dots(thread.queries, keys, count, p.size, thread.scores);
        P::dots(thread.grads, values, count, p.size, thread.dweights);
        for (int i = 0; i < TILE; ++i) {
            for (unsigned j = 0; j < unsigned(count * TILE); j += W) {
                int64_t query = tile.query + i, key = at[j / TILE] + j % TILE;
                Floats product = load<Floats>(thread.scores + i * SCORES + j);
                Floats weight = exp2(seen(p, tile, query, key, product) - all(lse[i]));
                Floats kept = weight, dweight = load<Floats>(thread.dweights + i * SCORES + j);
                if (p.threshold) {
                    Floats factor = dropout(p, tile, query, key);
                    kept *= factor;
                    dweight *= factor;
                }
                Floats dscore = weight * (dweight - all(inner[i]));
                if (g.dbias) {
                    float* dbias = g.dbias + bias_index(p, query, key);
                    store(dbias, load<Floats>(dbias) + dscore);
                }
                P::Weights::store(thread.weights + i * ROW + j, kept);
                P::Weights::store(thread.dscores + i * ROW + j, dscore * all(p.scale));
            }
        }
        P::add(thread.dscores, rows, count, p.size, thread.out);
        P::add_to_keys(thread.weights, at, count, grads, p.size, thread.sums.dv());
        P::add_to_keys(thread.dscores, at, count, queries, p.size, thread.sums.dk());
    }
    put<Type>(thread.out, TILE * p.size, 1, g.dq);
}

// Calls body(thread, number) for the numbers 0 to count - 1, on all threads.
template <typename Type, typename Body>
void share(const Problem& p, int64_t count, const Scratch& scratch, const Body& body) {
    Queue queue(count);
    parallel(scratch.threads, scratch.threads, [&](int64_t first, int64_t last) {
        for (int64_t number = first; number < last; ++number) {
            Thread<Type> thread(p, scratch, number);
            for (int64_t item; queue.take(item);) body(thread, item);
        }
    });
}

template <typename Type>
void forward(const Problem& p, const void* q_, const void* k_, const void* v_, void* out_, float* lse,
             const Scratch& scratch) {
    typedef typename Type::Element Element;
    const Element *q = static_cast<const Element*>(q_), *k = static_cast<const Element*>(k_);
    const Element* v = static_cast<const Element*>(v_);
    Element* out = static_cast<Element*>(out_);
    int64_t chunks = (p.padded + CHUNK - 1) / CHUNK;
    share<Type>(p, p.batch * p.query_heads * chunks, scratch, [&](Thread<Type>& thread, int64_t item) {
        int64_t row = item / chunks, first = item % chunks * CHUNK;
        Tile tile = {row / p.query_heads, row % p.query_heads, first};
        int64_t key_head = tile.sample * p.key_heads + tile.head * p.key_heads / p.query_heads;
        thread.keys.begin(k + key_head * p.padded * p.size);
        thread.rows.begin(v + key_head * p.padded * p.size);
        for (; tile.query < smaller(first + CHUNK, p.padded); tile.query += TILE) {
            int64_t position = row * p.padded + tile.query;
            forward_tile<Type>(p, tile, q + position * p.size, out + position * p.size, lse + position, thread);
        }
    });
}

// The queries of every head are cut into `splits`; dk and dv are [splits, batch, key heads, padded, size], in fp32 if
// scratch.sums is null; dbias is [splits, batch, query heads, 2 · padded].
template <typename Type>
void backward(const Problem& p, const void* grad_, const void* q_, const void* k_, const void* v_, const void* out_,
              const float* lse, void* dq_, void* dk_, void* dv_, float* dbias, int64_t splits,
              const Scratch& scratch) {
    typedef typename Type::Element Element;
    const Element *q = static_cast<const Element*>(q_), *k = static_cast<const Element*>(k_);
    const Element *v = static_cast<const Element*>(v_), *out = static_cast<const Element*>(out_);
    const Element* grad = static_cast<const Element*>(grad_);
    Element *dq = static_cast<Element*>(dq_), *dk = static_cast<Element*>(dk_), *dv = static_cast<Element*>(dv_);
    const bool in_place = !scratch.sums;
    int64_t group = p.query_heads / p.key_heads, key_heads = p.batch * p.key_heads, tiles = p.padded / TILE;
    share<Type>(p, key_heads * splits, scratch, [&](Thread<Type>& thread, int64_t item) {
        int64_t split = item % splits, key_head = item / splits, rows = p.padded * p.size;
        thread.keys.begin(k + key_head * rows);
        thread.values.begin(v + key_head * rows);
        thread.rows.begin(k + key_head * rows);
        int64_t sums = (split * key_heads + key_head) * rows;
        thread.sums.begin(in_place ? static_cast<float*>(dk_) + sums : nullptr,
                       in_place ? static_cast<float*>(dv_) + sums : nullptr);
        for (int64_t row = key_head * group; row < (key_head + 1) * group; ++row) {
            for (int64_t i = tiles * split / splits; i < tiles * (split + 1) / splits; ++i) {
                Tile tile = {row / p.query_heads, row % p.query_heads, i * TILE};
                int64_t position = row * p.padded + tile.query, at = position * p.size;
                float* bias = dbias ? dbias + (split * p.batch * p.query_heads + row) * 2 * p.padded : nullptr;
                Gradients<Type> g = {grad + at, q + at, out + at, lse + position, dq + at, bias};
                backward_tile<Type>(p, tile, g, thread);
            }
        }
        thread.sums.end([&](int64_t at, const float* of_keys, const float* of_values) {
            if (in_place) return;
            put<Type>(of_keys, TILE * p.size, 1, dk + sums + at);
            put<Type>(of_values, TILE * p.size, 1, dv + sums + at);
        });
    });
}

}  // namespace

// dtype: 0 float, 1 bfloat16. The numbers of `Problem` come last.
#define PROBLEM                                                                                                       \
    const int32_t *row_offsets, const int32_t *columns, int64_t heads, int64_t batch, int64_t query_heads,           \
        int64_t key_heads, int64_t length, int64_t padded, int64_t size, int64_t block, const float *key_bias,       \
        const float *bias, int64_t bias_heads, float scale, int causal, int64_t threshold, float kept, int64_t seed, \
        int64_t counter
#define PROBLEM_                                                                                                    \
    {row_offsets, columns, heads,      batch, query_heads, key_heads, length, padded, size,   block,                \
     key_bias,    bias,    bias_heads, scale, causal,      threshold, kept,   seed,   counter}

EXPORT(sparse_attention_forward)(const void* q, const void* k, const void* v, int dtype, void* out, float* lse,
                                 float* factors, uint8_t* done, int threads, PROBLEM) {
    Problem problem = PROBLEM_;
    Scratch scratch = {factors, nullptr, done, threads};
    (dtype == 0 ? forward<Float32> : forward<BFloat16>)(problem, q, k, v, out, lse, scratch);
}

EXPORT(sparse_attention_backward)(const void* grad, const void* q, const void* k, const void* v, const void* out,
                                  int dtype, const float* lse, void* dq, void* dk, void* dv, float* dbias,
                                  int64_t splits, float* factors, float* sums, uint8_t* done, int threads, PROBLEM) {
    Problem problem = PROBLEM_;
    Scratch scratch = {factors, sums, done, threads};
    (dtype == 0 ? backward<Float32> : backward<BFloat16>)(problem, grad, q, k, v, out, lse, dq, dk, dv, dbias, splits,
                                                          scratch);
}

// The number of panels of keys that forward visits over all tiles, which its work is proportional to.
EXPORT(sparse_attention_panels)(int64_t* panels, PROBLEM) {
    Problem problem = PROBLEM_;
    int64_t at[GROUP];
    *panels = 0;
    for (int64_t row = 0; row < batch * query_heads; ++row)
        for (int64_t query = 0; query < padded; query += TILE)
            for (Panels some(problem, {row / query_heads, row % query_heads, query}); int count = some.next(at);)
                *panels += count;
}
