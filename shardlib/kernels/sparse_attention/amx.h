// Products of bf16 by AMX tiles: 16 rows by 16 columns, over 16 numbers at a time, as many as the smallest block has.
// Tiles 0 to 3 hold sums, tile 4 the left factor, tile 5 the right one.
#pragma once

#include "../common/amx.h"
#include "products.h"

namespace {

// body(Count<0>()), …, body(Count<V - 1>())
template <int V, typename Body>
inline void each(const Body& body) {
    if constexpr (V > 1) each<V - 1>(body);
    body(Count<V - 1>());
}

template <>
struct Products<BFloat16> {
    typedef uint16_t Element;
    typedef uint16_t Held;
    static constexpr bool AS_THEY_LIE = false;
    static constexpr int ROW = 2 * SCORES;  // distance of rows of weights, which are stored over the fp32 scores
    static constexpr int64_t PAIR = 2 * TILE;

    struct Weights {
        static void store(uint16_t* to, Floats values) { ::store(to, _mm512_cvtneps_pbh(bitcast<__m512>(values))); }
    };

    struct Setup : Tiles {
        Setup() : Tiles({16, 16, 16, 16, 16, 8}, {64, 64, 64, 64, 32, 64}) {}
    };

    static Ints pair(const uint16_t* first, const uint16_t* second) {
        return paired(load<Shorts>(first), load<Shorts>(second));
    }

    // [TILE / 2][size] pairs
    static void rows(const uint16_t* from, int64_t size, uint16_t* into) {
        for (int64_t i = 0; i < TILE; i += 2)
            for (int64_t d = 0; d < size; d += TILE)
                store(into + i * size + 2 * d, pair(from + i * size + d, from + (i + 1) * size + d));
    }

    // [size / 2][TILE] pairs
    static void columns(const uint16_t* from, int64_t size, uint16_t* into) {
        int64_t d = 0;
        for (; d + PAIR <= size; d += PAIR) {
            Floats x[W];
            for (int i = 0; i < W; ++i) x[i] = load<Floats>(from + i * size + d);
            transpose(x);
            for (int i = 0; i < W; ++i) store(into + d * TILE + i * PAIR, x[i]);
        }
        if (d == size) return;
        Floats x[W];
        for (int i = 0; i < W; ++i) x[i] = bitcast<Floats>(__builtin_convertvector(load<Shorts>(from + i * size + d), Ints));
        transpose(x);
        for (int i = 0; i < W; i += 2) store(into + d * TILE + i * TILE, bitcast<Ints>(x[i]) | bitcast<Ints>(x[i + 1]) << 16);
    }

    class Factor {
       public:
        void read(const uint16_t* from, int64_t) { left_ = from; }
        const uint16_t* left() const { return left_; }
        const uint16_t* right(int64_t size) {
            rows(left_, size, room_);
            return room_;
        }

       private:
        const uint16_t* left_;
        alignas(64) uint16_t room_[TILE * LARGEST];
    };

    static void dots(const Factor& queries, const uint16_t* const* keys, int panels, int64_t size, float* scores) {
        by_vectors(panels, [&](int64_t first, auto count) {
            constexpr int V = decltype(count)::value;
            each<V>([](auto v) { tile_zero<v.value>(); });
            for (int64_t d = 0; d < size; d += TILE) {
                tile_load<4>(queries.left() + d, size * 2);
                each<V>([&](auto v) {
                    tile_load<5>(keys[first + v.value] + d * TILE, 64);
                    tile_multiply<v.value, 4, 5>();
                });
            }
            each<V>([&](auto v) { tile_store<v.value>(scores + (first + v.value) * TILE, SCORES * 4); });
        });
    }

    static void add(const uint16_t* weights, const uint16_t* const* values, int panels, int64_t size, float* out) {
        by_vectors(size / TILE, [&](int64_t first, auto count) {
            constexpr int V = decltype(count)::value;
            float* into = out + first * TILE;
            each<V>([&](auto v) { tile_load<v.value>(into + v.value * TILE, size * 4); });
            for (int panel = 0; panel < panels; ++panel) {
                tile_load<4>(weights + panel * TILE, ROW * 2);
                each<V>([&](auto v) {
                    tile_load<5>(values[panel] + (first + v.value) * PAIR, size * 4);
                    tile_multiply<v.value, 4, 5>();
                });
            }
            each<V>([&](auto v) { tile_store<v.value>(into + v.value * TILE, size * 4); });
        });
    }

    static void add_to_keys(const uint16_t* weights, const int64_t* at, int panels, const uint16_t* right, int64_t size,
                            float* out) {
        for (int panel = 0; panel < panels; panel += 2) {
            // Two panels are transposed at once: the rows of the result are the keys of the first, then of the second.
            Floats x[W] = {};
            int both = panel + 1 < panels ? 2 : 1;
            for (int half = 0; half < both; ++half)
                for (int i = 0; i < TILE / 2; ++i) {
                    const uint16_t* row = weights + 2 * i * ROW + (panel + half) * TILE;
                    x[half * TILE / 2 + i] = bitcast<Floats>(pair(row, row + ROW));
                }
            transpose(x);
            for (int half = 0; half < both; ++half)
                by_vectors(size / TILE, [&](int64_t first, auto count) {
                    constexpr int V = decltype(count)::value;
                    float* into = out + at[panel + half] * size + first * TILE;
                    tile_load<4>(reinterpret_cast<const uint16_t*>(x) + half * TILE, 64);
                    each<V>([&](auto v) {
                        tile_load<v.value>(into + v.value * TILE, size * 4);
                        tile_load<5>(right + (first + v.value) * PAIR, size * 4);
                        tile_multiply<v.value, 4, 5>();
                        tile_store<v.value>(into + v.value * TILE, size * 4);
                    });
                });
        }
    }
};

}  // namespace
