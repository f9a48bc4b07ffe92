// The mixer of the counter's random bits; see counter/__init__.py.
#pragma once
#include "simd.h"

namespace {

typedef uint32_t Words __attribute__((vector_size(4 * W)));

// Mixes one number, or each of `Words`.
template <typename Integers>
inline Integers mix(Integers x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

}  // namespace
