// Transposition of W × W numbers in registers.
#pragma once

#include "simd.h"

namespace {

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})  // GCC has the other from version 12 on
#endif

// The first (or the second) halves of a and b, their elements alternating.
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

// Transposes W × W numbers; every round moves one bit of the column's number to the row's number.
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

}  // namespace
