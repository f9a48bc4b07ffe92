// Block-sparse attention on the CPU; see op.py for the mathematics. Compiled once per instruction set (ISA names it).
//
// A tile of 16 queries goes along the keys of its blocks, 128 at a time, by the online softmax: for these keys, scores, a
// new maximum, weights, and what they add to the result. Nothing is kept of the scores but their log-sum-exp. Backward
// goes the same way and computes the weights anew; the gradients of keys and values are summed by one thread for a head,
// or a part of its queries, so that no two threads write to the same place.
#include "scores.h"

namespace {

constexpr int64_t CHUNK = 1024;  // queries of one item of work, forward

// Room for one head's matrices, for each thread: factors, [threads, 3, padded, size]; sums, [threads, 2, padded, size] or
// null where they are what is returned; and which panels of the factors and of the sums are there, [threads, 4, panels].
struct Scratch {
    float *factors, *sums;
    uint8_t* done;
    int threads;
};

// What one thread holds: keys, and backward values, whose columns are summed over; values, or keys backward, whose rows
// are; backward sums; a tile.
template <typename Type>
struct Thread {
    typedef Products<Type> P;
    typedef typename P::Held Held;
    // Weights take the place of what they are made from, row by row.
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
                  float* lse, Thread<Type>& own) {
    typedef Products<Type> P;
    constexpr int ROW = Thread<Type>::ROW;
    prefetch_next(q, p.size);
    own.queries.read(q, p.size);
    memset(own.out, 0, size_t(TILE * p.size) * sizeof(float));
    float most[TILE], found[TILE], subtract[TILE], factors[TILE], sums[TILE];
    Floats highest[TILE], totals[TILE] = {};  // of which all lanes count
    for (int i = 0; i < TILE; ++i) most[i] = -__builtin_inff();
    Panels panels(p, tile);
    int64_t at[GROUP];
    const typename P::Held *keys[GROUP], *values[GROUP];
    while (int count = panels.next(at)) {
        for (int panel = 0; panel < count; ++panel) {
            keys[panel] = own.keys.panel(at[panel]);
            values[panel] = own.rows.panel(at[panel]);
        }
        P::dots(own.queries, keys, count, p.size, own.scores);
        for (int i = 0; i < TILE; ++i) {
            highest[i] = all(most[i]);
            for (unsigned j = 0; j < unsigned(count * TILE); j += W) {
                float* place = own.scores + i * SCORES + j;
                Floats score = seen(p, tile, tile.query + i, at[j / TILE] + j % TILE, load<Floats>(place));
                highest[i] = score > highest[i] ? score : highest[i];
                store(place, score);
            }
        }
        fold(highest, found, [](Floats a, Floats b) { return a > b ? a : b; });
        for (int i = 0; i < TILE; i += W) {
            Floats now = load<Floats>(found + i);
            // Where no key was seen yet there is nothing to subtract.
            Floats less = now == all(-__builtin_inff()) ? Floats{} : now;
            store(subtract + i, less);
            store(factors + i, exp2(load<Floats>(most + i) - less));
            store(most + i, now);
        }
        for (int i = 0; i < TILE; ++i) {
            Floats total = totals[i] * all(factors[i]);
            for (unsigned j = 0; j < unsigned(count * TILE); j += W) {
                Floats weight = exp2(load<Floats>(own.scores + i * SCORES + j) - all(subtract[i]));
                total += weight;
                if (p.threshold) weight *= dropout(p, tile, tile.query + i, at[j / TILE] + j % TILE);
                P::Weights::store(own.weights + i * ROW + j, weight);
            }
            totals[i] = total;
        }
        scale_rows(own.out, p.size, factors);
        P::add(own.weights, values, count, p.size, own.out);
    }
    fold(totals, sums, [](Floats a, Floats b) { return a + b; });
    for (int i = 0; i < TILE; ++i) {
        float total = sums[i];
        put<Type>(own.out + i * p.size, p.size, total == 0 ? 0 : 1 / total, out + i * p.size);
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

// Everything about the gradients of a tile; those of the head's keys and values are added to.
template <typename Type>
void backward_tile(const Problem& p, const Tile& tile, const Gradients<Type>& g, Thread<Type>& own) {
    typedef Products<Type> P;
    constexpr int ROW = Thread<Type>::ROW;
    prefetch_next(g.q, p.size);
    prefetch_next(g.grad, p.size);
    prefetch_next(g.out, p.size);
    own.queries.read(g.q, p.size);
    own.grads.read(g.grad, p.size);
    memset(own.out, 0, size_t(TILE * p.size) * sizeof(float));
    float inner[TILE], lse[TILE];
    Floats products[TILE] = {};
    for (int i = 0; i < TILE; ++i) {
        for (int64_t d = i * p.size; d < (i + 1) * p.size; d += W)
            products[i] = fma(Type::load(g.grad + d), Type::load(g.out + d), products[i]);
        // A query that sees no key: every weight is 2^−∞.
        lse[i] = g.lse[i] == -__builtin_inff() ? __builtin_inff() : g.lse[i] * LOG2E;
    }
    fold(products, inner, [](Floats a, Floats b) { return a + b; });
    const typename P::Held *queries = own.queries.right(p.size), *grads = own.grads.right(p.size);
    Panels panels(p, tile);
    int64_t at[GROUP];
    const typename P::Held *keys[GROUP], *values[GROUP], *rows[GROUP];
    while (int count = panels.next(at)) {
        for (int panel = 0; panel < count; ++panel) {
            keys[panel] = own.keys.panel(at[panel]);
            values[panel] = own.values.panel(at[panel]);
            rows[panel] = own.rows.panel(at[panel]);
            own.sums.ready(at[panel]);
        }
        P::dots(own.queries, keys, count, p.size, own.scores);
        P::dots(own.grads, values, count, p.size, own.dweights);
        for (int i = 0; i < TILE; ++i) {
            for (unsigned j = 0; j < unsigned(count * TILE); j += W) {
                int64_t query = tile.query + i, key = at[j / TILE] + j % TILE;
                Floats product = load<Floats>(own.scores + i * SCORES + j);
                Floats weight = exp2(seen(p, tile, query, key, product) - all(lse[i]));
                Floats kept = weight, dweight = load<Floats>(own.dweights + i * SCORES + j);
                if (p.threshold) {
                    Floats factor = dropout(p, tile, query, key);
                    kept *= factor;
                    dweight *= factor;
                }
                Floats dscore = weight * (dweight - all(inner[i]));
                if (g.dbias) {
                    float* dbias = g.dbias + bias_place(p, query, key);
                    store(dbias, load<Floats>(dbias) + dscore);
                }
                P::Weights::store(own.weights + i * ROW + j, kept);
                P::Weights::store(own.dscores + i * ROW + j, dscore * all(p.scale));
            }
        }
        P::add(own.dscores, rows, count, p.size, own.out);
        P::add_to_keys(own.weights, at, count, grads, p.size, own.sums.dv());
        P::add_to_keys(own.dscores, at, count, queries, p.size, own.sums.dk());
    }
    put<Type>(own.out, TILE * p.size, 1, g.dq);
}

// Calls body(thread's own, number) for the numbers 0 to count - 1.
template <typename Type, typename Body>
void share(const Problem& p, int64_t count, const Scratch& scratch, const Body& body) {
    Queue queue(count);
    parallel(scratch.threads, scratch.threads, [&](int64_t first, int64_t last) {
        for (int64_t number = first; number < last; ++number) {
            Thread<Type> own(p, scratch, number);
            for (int64_t item; queue.take(item);) body(own, item);
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
    share<Type>(p, p.batch * p.query_heads * chunks, scratch, [&](Thread<Type>& own, int64_t item) {
        int64_t row = item / chunks, first = item % chunks * CHUNK;
        Tile tile = {row / p.query_heads, row % p.query_heads, first};
        int64_t key_head = tile.sample * p.key_heads + tile.head * p.key_heads / p.query_heads;
        own.keys.begin(k + key_head * p.padded * p.size);
        own.rows.begin(v + key_head * p.padded * p.size);
        for (; tile.query < smaller(first + CHUNK, p.padded); tile.query += TILE) {
            int64_t place = row * p.padded + tile.query;
            forward_tile<Type>(p, tile, q + place * p.size, out + place * p.size, lse + place, own);
        }
    });
}

// The queries of every head are cut into `parts`; dk and dv are [parts, batch, key heads, padded, size], in fp32 where
// there is no room for sums; dbias is [parts, batch, query heads, 2 · padded].
template <typename Type>
void backward(const Problem& p, const void* grad_, const void* q_, const void* k_, const void* v_, const void* out_,
              const float* lse, void* dq_, void* dk_, void* dv_, float* dbias, int64_t parts,
              const Scratch& scratch) {
    typedef typename Type::Element Element;
    const Element *q = static_cast<const Element*>(q_), *k = static_cast<const Element*>(k_);
    const Element *v = static_cast<const Element*>(v_), *out = static_cast<const Element*>(out_);
    const Element* grad = static_cast<const Element*>(grad_);
    Element *dq = static_cast<Element*>(dq_), *dk = static_cast<Element*>(dk_), *dv = static_cast<Element*>(dv_);
    const bool in_place = !scratch.sums;
    int64_t group = p.query_heads / p.key_heads, key_heads = p.batch * p.key_heads, tiles = p.padded / TILE;
    share<Type>(p, key_heads * parts, scratch, [&](Thread<Type>& own, int64_t item) {
        int64_t part = item % parts, key_head = item / parts, rows = p.padded * p.size;
        own.keys.begin(k + key_head * rows);
        own.values.begin(v + key_head * rows);
        own.rows.begin(k + key_head * rows);
        int64_t sums = (part * key_heads + key_head) * rows;
        own.sums.begin(in_place ? static_cast<float*>(dk_) + sums : nullptr,
                       in_place ? static_cast<float*>(dv_) + sums : nullptr);
        for (int64_t row = key_head * group; row < (key_head + 1) * group; ++row) {
            for (int64_t i = tiles * part / parts; i < tiles * (part + 1) / parts; ++i) {
                Tile tile = {row / p.query_heads, row % p.query_heads, i * TILE};
                int64_t place = row * p.padded + tile.query, at = place * p.size;
                float* bias = dbias ? dbias + (part * p.batch * p.query_heads + row) * 2 * p.padded : nullptr;
                Gradients<Type> g = {grad + at, q + at, out + at, lse + place, dq + at, bias};
                backward_tile<Type>(p, tile, g, own);
            }
        }
        own.sums.end([&](int64_t at, const float* of_keys, const float* of_values) {
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
                                  int64_t parts, float* factors, float* sums, uint8_t* done, int threads, PROBLEM) {
    Problem problem = PROBLEM_;
    Scratch scratch = {factors, sums, done, threads};
    (dtype == 0 ? backward<Float32> : backward<BFloat16>)(problem, grad, q, k, v, out, lse, dq, dk, dv, dbias, parts,
                                                          scratch);
}

// How many panels of keys forward goes along, over all tiles: what work is proportional to.
EXPORT(sparse_attention_panels)(int64_t* panels, PROBLEM) {
    Problem problem = PROBLEM_;
    int64_t at[GROUP];
    *panels = 0;
    for (int64_t row = 0; row < batch * query_heads; ++row)
        for (int64_t query = 0; query < padded; query += TILE)
            for (Panels some(problem, {row / query_heads, row % query_heads, query}); int found = some.next(at);)
                *panels += found;
}
