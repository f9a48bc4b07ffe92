// Products of rows of bf16 with weights of bf16 by AMX tiles, summed in fp32. Weights are the left factor, which tiles read as
// it lies in memory; x is the right one, packed once. A tile's sums are those of its row and column alone, in one order.
#pragma once

#include "panels.h"
#include "weights.h"

namespace {

constexpr int64_t AHEAD = 2 * LINES;  // weight rows that a step reads

// A tile of 16 weight rows from `first` and 32 columns from i, in memory that may be read; numbers outside are 0.
struct Left {
    const Plain<BFloat16>& weights;
    int64_t last;
    uint16_t (&padded)[LINES][DEEP];

    template <int tile>
    void load(int64_t first, int64_t i) const {
        const int64_t columns = weights.columns;
        if (first + LINES <= last && i + DEEP <= columns)
            return tile_load<tile>(weights.address(first, i), columns * int64_t(sizeof(uint16_t)));
        const uint32_t mask = lowest(columns - i);
        for (int64_t row = 0; row < LINES; ++row)
            _mm512_storeu_si512(padded[row], first + row < last
                                                 ? _mm512_maskz_loadu_epi16(mask, weights.address(first + row, i))
                                                 : _mm512_setzero_si512());
        tile_load<tile>(padded, sizeof(padded[0]));
    }
};

// Writes y[r][p] = sums[p][r] + bias[p] for `rows` rows and `held` weight rows.
inline void finish(Floats (&sums)[LINES], int64_t rows, int64_t held, const uint16_t* bias, uint16_t* y, int64_t stride) {
    transpose(sums);
    const Floats added = bias ? get<BFloat16>(bias, held) : Floats{};
    for (int64_t r = 0; r < rows; ++r) put<BFloat16>(y + r * stride, sums[r] + added, held);
}

// x: panels of 16 rows, as `pack` makes them; 32 weight rows at a time meet 16 rows of x.
inline void multiply_tiles(const Plain<BFloat16>& weights, int64_t outputs, const uint32_t* x, int64_t rows, int64_t group,
                           const uint16_t* bias, uint16_t* y, int threads) {
    const int64_t columns = weights.columns, base = group * outputs, end = base + outputs, deep = tiles(columns);
    parallel((outputs + AHEAD - 1) / AHEAD, worth(threads, outputs * columns, 1 << 18), [&](int64_t from, int64_t to) {
        const Tiles shapes({16, 16, 16, 16, 16, 0, 0, 0}, {64, 64, 64, 64, 64, 0, 0, 0});
        alignas(64) uint16_t padded[LINES][DEEP];
        const Left left{weights, end, padded};
        for (int64_t p = from * AHEAD; p < smaller(to * AHEAD, outputs); p += AHEAD) {
            const int64_t first = base + p;
            for (int64_t r = 0; r < rows; r += LINES) {
                tile_zero<0>(), tile_zero<1>();
                for (int64_t k = 0; k < deep; ++k) {
                    if (r == 0)
                        for (int64_t row = first + AHEAD; row < first + 2 * AHEAD; ++row)
                            __builtin_prefetch(weights.address(row, k * DEEP), 0, 2);
                    tile_load<2>(x + (r / LINES * deep + k) * TILE, LINES * 4);
                    left.load<3>(first, k * DEEP);
                    left.load<4>(first + LINES, k * DEEP);
                    tile_multiply<0, 3, 2>();
                    tile_multiply<1, 4, 2>();
                }
                alignas(64) Floats sums[2][LINES];
                tile_store<0>(sums[0], LINES * 4);
                tile_store<1>(sums[1], LINES * 4);
                for (int64_t half = 0; half < 2; ++half) {
                    const int64_t q = p + half * LINES;
                    if (q < outputs)
                        finish(sums[half], smaller(LINES, rows - r), smaller(LINES, outputs - q),
                               bias ? bias + base + q : nullptr, y + r * outputs + q, outputs);
                }
            }
        }
    });
}

}  // namespace
