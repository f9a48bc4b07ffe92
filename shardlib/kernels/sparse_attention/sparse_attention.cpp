// Block-sparse attention on the CPU; see op.py for the mathematics. Compiled once per instruction set (ISA names it).
//
// A tile of W queries goes along the keys of its blocks, 128 at a time, by the online softmax: for these keys, scores, a new
// maximum, weights, and what they add to the result. Nothing is kept of the scores but their log-sum-exp. Backward goes
// the same way and computes the weights anew; the gradients of keys and values are summed by one thread for a head, or
// a part of its queries, so that sums are in one order whatever the number of threads.
#include "scores.h"

namespace {

constexpr int64_t LARGEST = 256;  // size of a head
constexpr int64_t CHUNK = 1024;   // queries of one item of work, forward

// Everything that one thread holds of a tile.
struct alignas(64) Room {
    float queries[LARGEST * W], grads[LARGEST * W], out[LARGEST * W];         // transposed
    float query_rows[LARGEST * W], grad_rows[LARGEST * W], out_rows[LARGEST * W];  // as they lie, in fp32
    float weights[GROUP * PANEL * W];
};

template <typename Type>
inline const float* rows(const typename Type::Element* from, int64_t size, float* room) {
    for (int64_t i = 0; i < W * size; i += W) store(room + i, Type::load(from + i));
    return room;
}

template <>
inline const float* rows<Float32>(const float* from, int64_t, float*) {
    return from;
}

template <typename Type>
void forward_tile(const Problem& p, const Tile& tile, const typename Type::Element* q, Rows<Type>& keys,
                  Rows<Type>& values, typename Type::Element* out, float* lse, Room& room) {
    load_transposed(rows<Type>(q, p.size, room.query_rows), p.size, p.scale * LOG2E, room.queries);
    memset(room.out, 0, size_t(p.size) * sizeof(Floats));
    Floats most = all(-__builtin_inff()), total = {};
    Dropout dropout(p, tile);
    Panels panels(p, tile);
    int64_t at[GROUP];
    const float* from[GROUP];
    while (int count = panels.next(at)) {
        Floats highest = most;
        for (int panel = 0; panel < count; ++panel) {
            Floats scores[PANEL];
            score(p, tile, at[panel], keys.panel(at[panel]), room.queries, scores);
            for (int r = 0; r < PANEL; ++r) {
                highest = scores[r] > highest ? scores[r] : highest;
                store(room.weights + (panel * PANEL + r) * W, scores[r]);
            }
            from[panel] = values.panel(at[panel]);
        }
        // Where no key was seen yet there is nothing to subtract.
        Floats subtract = highest == all(-__builtin_inff()) ? Floats{} : highest;
        Floats factor = exp2(most - subtract);
        total *= factor;
        for (int r = 0; r < count * PANEL; ++r) {
            float* place = room.weights + r * W;
            Floats weight = exp2(load<Floats>(place) - subtract);
            total += weight;
            store(place, p.threshold ? weight * dropout(at[r / PANEL] + r % PANEL) : weight);
        }
        add_values(from, room.weights, count, p.size, factor, room.out);
        most = highest;
    }
    store_transposed<Type>(room.out, p.size, total == Floats{} ? Floats{} : all(1.0f) / total, out);
    for (int lane = 0; lane < W; ++lane)
        lse[lane] = total[lane] == 0 ? -__builtin_inff() : most[lane] * LN2 + __builtin_logf(total[lane]);
}

template <typename Type>
struct Gradients {
    const typename Type::Element *grad, *q, *out;
    const float* lse;
    typename Type::Element* dq;
    float *dk, *dv, *dbias;  // one head's; dbias null where there is no bias
};

// Everything about the gradients of a tile; those of the heads' keys and values are added to.
template <typename Type>
void backward_tile(const Problem& p, const Tile& tile, const Gradients<Type>& g, Rows<Type>& keys, Rows<Type>& values,
                   Room& room) {
    const float* query_rows = rows<Type>(g.q, p.size, room.query_rows);
    const float* grad_rows = rows<Type>(g.grad, p.size, room.grad_rows);
    const float* out_rows = rows<Type>(g.out, p.size, room.out_rows);
    load_transposed(query_rows, p.size, p.scale * LOG2E, room.queries);
    load_transposed(grad_rows, p.size, 1, room.grads);
    memset(room.out, 0, size_t(p.size) * sizeof(Floats));
    Floats inner = {}, lse = {};
    for (int lane = 0; lane < W; ++lane) {
        Floats sum = {};
        for (int64_t d = 0; d < p.size; d += W)
            sum = fma(load<Floats>(grad_rows + lane * p.size + d), load<Floats>(out_rows + lane * p.size + d), sum);
        for (int i = 0; i < W; ++i) inner[lane] += sum[i];
        // A query that sees no key: every weight is 2^−∞.
        lse[lane] = g.lse[lane] == -__builtin_inff() ? __builtin_inff() : g.lse[lane] * LOG2E;
    }
    Dropout dropout(p, tile);
    Panels panels(p, tile);
    int64_t at[GROUP];
    const float* from[GROUP];
    alignas(64) float kept_weights[PANEL * W];
    while (int count = panels.next(at)) {
        for (int panel = 0; panel < count; ++panel) {
            float* dscores = room.weights + panel * PANEL * W;
            Floats scores[PANEL], dweights[PANEL];
            from[panel] = keys.panel(at[panel]);
            score(p, tile, at[panel], from[panel], room.queries, scores);
            dots(values.panel(at[panel]), room.grads, p.size, dweights);
            float* dbias = g.dbias ? g.dbias + tile.query - at[panel] + p.padded - 1 : nullptr;
            for (int r = 0; r < PANEL; ++r) {
                Floats weight = exp2(scores[r] - lse), kept = weight;
                if (p.threshold) {
                    Floats factor = dropout(at[panel] + r);
                    kept *= factor;
                    dweights[r] *= factor;
                }
                Floats dscore = weight * (dweights[r] - inner);
                if (dbias) store(dbias - r, load<Floats>(dbias - r) + dscore);
                store(kept_weights + r * W, kept);
                store(dscores + r * W, dscore * all(p.scale));
            }
            add_outer(kept_weights, grad_rows, p.size, g.dv + at[panel] * p.size);
            add_outer(dscores, query_rows, p.size, g.dk + at[panel] * p.size);
        }
        add_values(from, room.weights, count, p.size, all(1), room.out);
    }
    store_transposed<Type>(room.out, p.size, all(1), g.dq);
}

// A thread's keys and values, and its room; scratch is [threads, 2, padded, size] and done [threads, 2, panels], null
// where nothing is converted.
template <typename Type>
struct Thread {
    Rows<Type> keys, values;
    Room room;

    Thread(const Problem& p, int64_t number, float* scratch, uint8_t* done)
        : keys(scratch, done, 2 * number, p), values(scratch, done, 2 * number + 1, p) {}
};

// Calls body(thread's own, number) for the numbers 0 to count - 1.
template <typename Type, typename Body>
void share(const Problem& p, int64_t count, float* scratch, uint8_t* done, int threads, const Body& body) {
    Queue queue(count);
    parallel(threads, threads, [&](int64_t first, int64_t last) {
        for (int64_t number = first; number < last; ++number) {
            Thread<Type> own(p, number, scratch, done);
            for (int64_t item; queue.take(item);) body(own, item);
        }
    });
}

template <typename Type>
void forward(const Problem& p, const void* q_, const void* k_, const void* v_, void* out_, float* lse, float* scratch,
             uint8_t* done, int threads) {
    typedef typename Type::Element Element;
    const Element *q = static_cast<const Element*>(q_), *k = static_cast<const Element*>(k_);
    const Element* v = static_cast<const Element*>(v_);
    Element* out = static_cast<Element*>(out_);
    int64_t chunks = (p.padded + CHUNK - 1) / CHUNK;
    share<Type>(p, p.batch * p.query_heads * chunks, scratch, done, threads, [&](Thread<Type>& own, int64_t item) {
        int64_t row = item / chunks, first = item % chunks * CHUNK;
        Tile tile = {row / p.query_heads, row % p.query_heads, first};
        int64_t key_head = tile.sample * p.key_heads + tile.head * p.key_heads / p.query_heads;
        own.keys.begin(k + key_head * p.padded * p.size);
        own.values.begin(v + key_head * p.padded * p.size);
        for (; tile.query < smaller(first + CHUNK, p.padded); tile.query += W) {
            int64_t place = row * p.padded + tile.query;
            forward_tile<Type>(p, tile, q + place * p.size, own.keys, own.values, out + place * p.size, lse + place,
                               own.room);
        }
    });
}

// The queries of every head are cut into `parts`; dk and dv are [parts, batch, key heads, padded, size], dbias is
// [parts, batch, query heads, 2 · padded].
template <typename Type>
void backward(const Problem& p, const void* grad_, const void* q_, const void* k_, const void* v_, const void* out_,
              const float* lse, void* dq_, float* dk, float* dv, float* dbias, int64_t parts, float* scratch,
              uint8_t* done, int threads) {
    typedef typename Type::Element Element;
    const Element *q = static_cast<const Element*>(q_), *k = static_cast<const Element*>(k_);
    const Element *v = static_cast<const Element*>(v_), *out = static_cast<const Element*>(out_);
    const Element* grad = static_cast<const Element*>(grad_);
    Element* dq = static_cast<Element*>(dq_);
    int64_t group = p.query_heads / p.key_heads, key_heads = p.batch * p.key_heads, tiles = p.padded / W;
    share<Type>(p, key_heads * parts, scratch, done, threads, [&](Thread<Type>& own, int64_t item) {
        int64_t part = item % parts, key_head = item / parts, rows = p.padded * p.size;
        own.keys.begin(k + key_head * rows);
        own.values.begin(v + key_head * rows);
        for (int64_t row = key_head * group; row < (key_head + 1) * group; ++row) {
            for (int64_t i = tiles * part / parts; i < tiles * (part + 1) / parts; ++i) {
                Tile tile = {row / p.query_heads, row % p.query_heads, i * W};
                int64_t place = row * p.padded + tile.query, at = place * p.size;
                int64_t sums = (part * key_heads + key_head) * rows;
                float* bias = dbias ? dbias + (part * p.batch * p.query_heads + row) * 2 * p.padded : nullptr;
                Gradients<Type> g = {grad + at, q + at, out + at, lse + place, dq + at, dk + sums, dv + sums, bias};
                backward_tile<Type>(p, tile, g, own.keys, own.values, own.room);
            }
        }
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
                                 float* scratch, uint8_t* done, int threads, PROBLEM) {
    Problem problem = PROBLEM_;
    (dtype == 0 ? forward<Float32> : forward<BFloat16>)(problem, q, k, v, out, lse, scratch, done, threads);
}

EXPORT(sparse_attention_backward)(const void* grad, const void* q, const void* k, const void* v, const void* out,
                                  int dtype, const float* lse, void* dq, float* dk, float* dv, float* dbias,
                                  int64_t parts, float* scratch, uint8_t* done, int threads, PROBLEM) {
    Problem problem = PROBLEM_;
    (dtype == 0 ? backward<Float32> : backward<BFloat16>)(problem, grad, q, k, v, out, lse, dq, dk, dv, dbias, parts,
                                                          scratch, done, threads);
}

// How many panels of keys forward goes along, over all tiles: what work is proportional to.
EXPORT(sparse_attention_panels)(int64_t* panels, PROBLEM) {
    Problem problem = PROBLEM_;
    int64_t at[GROUP];
    *panels = 0;
    for (int64_t row = 0; row < batch * query_heads; ++row)
        for (int64_t query = 0; query < padded; query += W)
            for (Panels some(problem, {row / query_heads, row % query_heads, query}); int found = some.next(at);)
                *panels += found;
}
