// AMX tiles for products of bf16 that are summed in fp32: up to 16 rows of up to 64 bytes each. A left factor has 16 rows of
// up to 32 numbers. A right one has 16 columns, in pairs of rows: the first of a pair in the lower half of every 32 bits.
#pragma once

#include "simd.h"

namespace {

// The shapes of this thread's tiles; an instance lives while the thread uses them.
class Tiles {
   public:
    Tiles(const uint8_t (&rows)[8], const uint8_t (&row_bytes)[8]) {
        struct {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        static_assert(sizeof(shapes) == 64, "");
        for (int tile = 0; tile < 8; ++tile) shapes.rows[tile] = rows[tile], shapes.row_bytes[tile] = row_bytes[tile];
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }
    Tiles(const Tiles&) = delete;
    ~Tiles() { asm volatile("tilerelease"); }
};

// Inline assembly, as the compilers' intrinsics do not take a template parameter as the number of a tile.
template <int tile>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

template <int tile>
inline void tile_load(const void* from, int64_t bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(bytes), "i"(tile) : "memory");
}

template <int tile>
inline void tile_store(void* to, int64_t bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(bytes), "i"(tile) : "memory");
}

// sum += left · right
template <int sum, int left, int right>
inline void tile_multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(left), "i"(right));
}

// Pairs of 16 numbers each, the first in the lower halves.
inline Ints paired(Shorts first, Shorts second) {
    return __builtin_convertvector(first, Ints) | __builtin_convertvector(second, Ints) << 16;
}

}  // namespace
