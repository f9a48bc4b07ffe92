// Vectors for tiles of 16 queries and panels of 16 keys: loops, reduction, powers of two.
#pragma once

#include "../common/transpose.h"

namespace {

constexpr int TILE = 16;           // queries of a tile, keys of a panel; divides every block
constexpr int GROUP = 8;           // panels whose scores are held at a time
constexpr int SCORES = GROUP * TILE;  // scores of a row
constexpr int64_t LARGEST = 256;   // size of a head
constexpr int VECTORS = W == 16 ? 4 : 2;  // vectors of results at a time

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

// Calls body(first, Count) for VECTORS vectors at a time, then for the rest.
template <typename Body>
inline void by_vectors(int64_t vectors, const Body& body) {
    int64_t first = 0;
    for (; first + VECTORS <= vectors; first += VECTORS) body(first, Count<VECTORS>());
    rest<VECTORS - 1>(first, vectors - first, body);
}

// Prefetches the TILE rows that follow: the hardware's prefetching stops at every 4 KB, one tile of 64 floats.
template <typename Element>
inline void prefetch_next(const Element* rows, int64_t size) {
    const char* next = reinterpret_cast<const char*>(rows + TILE * size);
    for (int64_t i = 0; i < TILE * size * int64_t(sizeof(Element)); i += 64) __builtin_prefetch(next + i);
}

// result[i] = the lanes of rows[i], reduced by `both`.
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

// 2^x for x ≤ 127, to 1e-7; 0 below −126. The polynomial of degree 6 has the least relative error on [−½, ½].
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
