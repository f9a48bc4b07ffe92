// Small matrix products for attention: 16 queries (a tile) by 16 keys (a panel) at a time. One factor is read a number
// at a time, the other by vectors; each number is used for VECTORS of them, as two loads a cycle would not feed two
// multipliers otherwise.
#pragma once

#include "../simd.h"

namespace {

constexpr int TILE = 16;           // queries of a tile, keys of a panel; divides every block
constexpr int PARTS = TILE / W;    // vectors of a panel's keys
constexpr int ROWS = 4;            // of the result, at a time,
constexpr int VECTORS = W == 16 ? 4 : 2;  // by so many vectors: half of the registers

typedef Floats Sums[ROWS][VECTORS];

// sums[r][v] += Σ_t number(r, t) · vector(v, t), for V vectors
template <int V, typename Number, typename Vector>
inline void multiply(int64_t count, const Number& number, const Vector& vector, Sums& sums) {
    for (int64_t t = 0; t < count; ++t) {
        Floats vectors[V];
        for (int v = 0; v < V; ++v) vectors[v] = load<Floats>(vector(v, t));
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            Floats factor = all(*number(r, t));
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[r][v] = fma(factor, vectors[v], sums[r][v]);
        }
    }
}

template <int V>
struct Count {
    static constexpr int value = V;
};

template <int V, typename Body>
inline void rest(int64_t first, int64_t left, const Body& body) {
    if constexpr (V > 0) {
        if (left == V)
            body(first, Count<V>());
        else
            rest<V - 1>(first, left, body);
    }
}

// body(first, Count) for all vectors, VECTORS at a time and what is left.
template <typename Body>
inline void by_vectors(int64_t vectors, const Body& body) {
    int64_t first = 0;
    for (; first + VECTORS <= vectors; first += VECTORS) body(first, Count<VECTORS>());
    rest<VECTORS - 1>(first, vectors - first, body);
}

// scores[i][j] = Σ_d queries[i][d] · keys[d][j]; the keys are panels of [size][TILE].
inline void dots(const float* queries, const float* const* keys, int panels, int64_t size, float* scores, int64_t row) {
    by_vectors(panels * PARTS, [&](int64_t first, auto count) {
        constexpr int V = decltype(count)::value;
        const float* vectors[V];
        for (int v = 0; v < V; ++v) vectors[v] = keys[(first + v) / PARTS] + (first + v) % PARTS * W;
        for (int i = 0; i < TILE; i += ROWS) {
            Sums sums = {};
            const float* from = queries + i * size;
            multiply<V>(
                size, [=](int r, int64_t d) { return from + r * size + d; },
                [&](int v, int64_t d) { return vectors[v] + d * TILE; }, sums);
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < V; ++v) store(scores + (i + r) * row + (first + v) * W, sums[r][v]);
        }
    });
}

// out[i][d] = out[i][d] · factors[i] + Σ_t a[i · ROW + t · STEP] · b[t][d]; b is panels of [TILE][size], one after the
// other in t.
template <int ROW, int STEP>
inline void accumulate(const float* a, const float* const* b, int panels, int64_t size, const float* factors,
                       float* out) {
    by_vectors(size / W, [&](int64_t first, auto count) {
        constexpr int V = decltype(count)::value;
        for (int i = 0; i < TILE; i += ROWS) {
            float* into = out + i * size + first * W;
            Sums sums;
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < V; ++v)
                    sums[r][v] = load<Floats>(into + r * size + v * W) * all(factors[i + r]);
            for (int panel = 0; panel < panels; ++panel) {
                const float *numbers = a + i * ROW + panel * TILE * STEP, *vectors = b[panel] + first * W;
                multiply<V>(
                    TILE, [=](int r, int64_t t) { return numbers + r * ROW + t * STEP; },
                    [=](int v, int64_t t) { return vectors + t * size + v * W; }, sums);
            }
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < V; ++v) store(into + r * size + v * W, sums[r][v]);
        }
    });
}

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})  // GCC before 12 has no other
#endif

// The first, or the second, half of a and of b, taking turns.
template <bool second>
inline Floats interleave(Floats a, Floats b) {
    constexpr int h = second ? W / 2 : 0;
#if defined(__AVX512F__)
    return SHUFFLE(a, b, h, W + h, h + 1, W + h + 1, h + 2, W + h + 2, h + 3, W + h + 3, h + 4, W + h + 4, h + 5,
                   W + h + 5, h + 6, W + h + 6, h + 7, W + h + 7);
#elif defined(__AVX2__)
    return SHUFFLE(a, b, h, W + h, h + 1, W + h + 1, h + 2, W + h + 2, h + 3, W + h + 3);
#else
    return SHUFFLE(a, b, h, W + h, h + 1, W + h + 1);
#endif
}

// W × W numbers; every round moves one bit of the place in a row to the number of the row.
inline void transpose(Floats (&x)[W]) {
    for (int round = 1; round < W; round *= 2) {
        Floats y[W];
        for (int i = 0; i < W / 2; ++i) {
            y[2 * i] = interleave<false>(x[i], x[i + W / 2]);
            y[2 * i + 1] = interleave<true>(x[i], x[i + W / 2]);
        }
        for (int i = 0; i < W; ++i) x[i] = y[i];
    }
}

// Of the TILE rows that follow these: the hardware's prefetching stops at every 4 KB, which is just one tile of 64 floats.
template <typename Element>
inline void prefetch_next(const Element* rows, int64_t size) {
    const char* next = reinterpret_cast<const char*>(rows + TILE * size);
    for (int64_t i = 0; i < TILE * size * int64_t(sizeof(Element)); i += 64) __builtin_prefetch(next + i);
}

// [size][TILE] from TILE rows.
template <typename Type>
inline void transpose_panel(const typename Type::Element* rows, int64_t size, float* into) {
    for (int64_t d = 0; d < size; d += W) {
        for (int part = 0; part < TILE; part += W) {
            Floats x[W];
            for (int i = 0; i < W; ++i) x[i] = Type::load(rows + (part + i) * size + d);
            transpose(x);
            for (int i = 0; i < W; ++i) store(into + (d + i) * TILE + part, x[i]);
        }
    }
}

// result[i] = the lanes of rows[i] put together by `both`.
template <typename Both>
inline void fold(const Floats (&rows)[TILE], float* result, const Both& both) {
    for (int first = 0; first < TILE; first += W) {
        Floats x[W];
        for (int i = 0; i < W; ++i) x[i] = rows[first + i];
        transpose(x);
        for (int step = W / 2; step; step /= 2)
            for (int i = 0; i < step; ++i) x[i] = both(x[i], x[i + step]);
        store(result + first, x[0]);
    }
}

// 2^x for x ≤ 127, to 1e-7; 0 below −126. A polynomial of degree 6 that is best by its relative error on [−½, ½].
inline Floats exp2(Floats x) {
    x = x < all(-127.0f) ? all(-127.0f) : x;  // a NaN stays one
    Floats shifted = x + all(12582912.0f);    // 1.5 · 2²³: rounds to a whole number, in the lowest bits
    Floats f = x - (shifted - all(12582912.0f));
    Floats p = all(1.534576149e-4f);
    p = fma(p, f, all(1.339993090e-3f));
    p = fma(p, f, all(9.618489072e-3f));
    p = fma(p, f, all(5.550328642e-2f));
    p = fma(p, f, all(2.402264625e-1f));
    p = fma(p, f, all(6.931471825e-1f));
    p = fma(p, f, all(1.0f));
    return p * bitcast<Floats>((bitcast<Ints>(shifted) + (127 - 0x4b400000)) << 23);
}

}  // namespace
