// Small matrix products for attention. The W queries of a tile lie in the lanes of vectors: scores, weights, and
// transposed queries and results are [·][W], while keys and values are read as they lie, a number at a time. So softmax
// needs no sum across lanes, and nothing of the keys is packed.
#pragma once

#include "../simd.h"

namespace {

constexpr int PANEL = 16;           // keys that are worked on together; divides every block
constexpr int SUMS = W == 16 ? 16 : 8;  // vectors that are summed at a time: half of the registers

// scores[r] = Σ_d keys[r][d] · queries[d], for the keys of a panel.
inline void dots(const float* keys, const float* queries, int64_t size, Floats (&scores)[PANEL]) {
    for (int first = 0; first < PANEL; first += SUMS) {
        const float* from = keys + first * size;
        Floats sums[SUMS] = {};
        for (int64_t d = 0; d < size; ++d) {
            Floats query = load<Floats>(queries + d * W);
#pragma GCC unroll 16
            for (int r = 0; r < SUMS; ++r) sums[r] = fma(all(from[r * size + d]), query, sums[r]);
        }
        for (int r = 0; r < SUMS; ++r) scores[first + r] = sums[r];
    }
}

// out[d] = out[d] · factor + Σ_r values[r][d] · weights[r], over the keys of several panels.
inline void add_values(const float* const* values, const float* weights, int panels, int64_t size, Floats factor,
                       float* out) {
    for (int64_t d = 0; d < size; d += SUMS) {
        Floats sums[SUMS];
        for (int c = 0; c < SUMS; ++c) sums[c] = load<Floats>(out + (d + c) * W) * factor;
        for (int panel = 0; panel < panels; ++panel) {
            const float* from = values[panel] + d;
            for (int r = 0; r < PANEL; ++r) {
                Floats weight = load<Floats>(weights + (panel * PANEL + r) * W);
#pragma GCC unroll 16
                for (int c = 0; c < SUMS; ++c) sums[c] = fma(all(from[r * size + c]), weight, sums[c]);
            }
        }
        for (int c = 0; c < SUMS; ++c) store(out + (d + c) * W, sums[c]);
    }
}

// sums[r][d] += Σ_q weights[r][q] · rows[q][d], for the keys of a panel and the queries of a tile.
inline void add_outer(const float* weights, const float* rows, int64_t size, float* out) {
    for (int first = 0; first < PANEL; first += SUMS) {
        for (int64_t d = 0; d < size; d += W) {
            float* into = out + first * size + d;
            Floats sums[SUMS];
            for (int r = 0; r < SUMS; ++r) sums[r] = load<Floats>(into + r * size);
            for (int q = 0; q < W; ++q) {
                Floats row = load<Floats>(rows + q * size + d);
#pragma GCC unroll 16
                for (int r = 0; r < SUMS; ++r) sums[r] = fma(all(weights[(first + r) * W + q]), row, sums[r]);
            }
            for (int r = 0; r < SUMS; ++r) store(into + r * size, sums[r]);
        }
    }
}

// The first, or the second, half of a and of b, taking turns.
template <bool second>
inline Floats interleave(Floats a, Floats b) {
    constexpr int h = second ? W / 2 : 0;
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, h, W + h, h + 1, W + h + 1, h + 2, W + h + 2, h + 3, W + h + 3, h + 4,
                                   W + h + 4, h + 5, W + h + 5, h + 6, W + h + 6, h + 7, W + h + 7);
#elif defined(__AVX2__)
    return __builtin_shufflevector(a, b, h, W + h, h + 1, W + h + 1, h + 2, W + h + 2, h + 3, W + h + 3);
#else
    return __builtin_shufflevector(a, b, h, W + h, h + 1, W + h + 1);
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

// [size][W] from W rows, times factor.
inline void load_transposed(const float* rows, int64_t size, float factor, float* into) {
    for (int64_t d = 0; d < size; d += W) {
        Floats x[W];
        for (int i = 0; i < W; ++i) x[i] = load<Floats>(rows + i * size + d) * all(factor);
        transpose(x);
        for (int i = 0; i < W; ++i) store(into + (d + i) * W, x[i]);
    }
}

// W rows from [size][W], times the factor of each row.
template <typename Type>
inline void store_transposed(const float* from, int64_t size, Floats factor, typename Type::Element* rows) {
    for (int64_t d = 0; d < size; d += W) {
        Floats x[W];
        for (int i = 0; i < W; ++i) x[i] = load<Floats>(from + (d + i) * W) * factor;
        transpose(x);
        for (int i = 0; i < W; ++i) Type::store(rows + i * size + d, x[i]);
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
