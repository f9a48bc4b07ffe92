// Products of rows with weights by vectors of floats.
//
// W sums are computed at a time, of a few rows with a few weight rows, each over the columns in one order; then their lanes are
// added, in one order too: a result has the same bits among any other rows. While a panel of W weight rows is multiplied, the
// next one is on its way to the second-level cache: several rows of x take longer than reading, and would else wait for it.
#pragma once

#include <memory>
#include <utility>

#include "transpose.h"
#include "weights.h"

namespace {

constexpr int TOGETHER = 4;  // rows of x, of which the sums of one weight row are computed at a time

// Lane l is a[l] + a[l ^ STEP] where the bit STEP of l is clear, and the same of b where it is set.
template <int STEP, int... lanes>
inline Floats merged(Floats a, Floats b, std::integer_sequence<int, lanes...>) {
    const Floats kept = SHUFFLE(a, b, (lanes & STEP ? W + lanes : lanes)...);
    const Floats moved = SHUFFLE(b, a, (lanes & STEP ? W + lanes : lanes)...);
    return kept + SHUFFLE(moved, moved, (lanes ^ STEP)...);
}

// Lane l is the total of v[l].
template <int STEP = 1>
inline Floats totals(Floats (&v)[W]) {
    if constexpr (STEP < W) {
        for (int i = 0; i < W / STEP; i += 2)
            v[i / 2] = merged<STEP>(v[i], v[i + 1], std::make_integer_sequence<int, W>());
        return totals<2 * STEP>(v);
    }
    return v[0];
}

// Rows of x, one of several groups of them that meet the same weights.
struct Group {
    const float* x;
    int64_t columns;
    int index, count;
};

// The products of ROWS rows of x with the weight rows first to first + W / ROWS − 1, of which those from `last` on are the one
// before `last`: y[r][p], contiguous.
template <int ROWS, typename Weights>
inline Floats products(const Weights& weights, int64_t first, int64_t last, const Group& group) {
    constexpr int WIDE = W / ROWS;
    const Plain<Float32> x{group.x, group.columns};
    int64_t rows[WIDE];
    for (int p = 0; p < WIDE; ++p) rows[p] = smaller(first + p, last - 1);
    Floats sums[W] = {};
    auto add = [&](auto read) {
        Floats v[ROWS];
        for (int r = 0; r < ROWS; ++r) v[r] = read(x, r);
        for (int p = 0; p < WIDE; ++p) {
            const Floats w = read(weights, rows[p]);
            for (int r = 0; r < ROWS; ++r) sums[r * WIDE + p] = fma(w, v[r], sums[r * WIDE + p]);
        }
    };
    // Each group fetches its share of the next panel's rows.
    const int from = WIDE * group.index / group.count, to = WIDE * (group.index + 1) / group.count;
    int64_t i = 0;
    for (; i + W <= group.columns; i += W) {
        for (int p = from; p < to; ++p) __builtin_prefetch(weights.address(rows[p] + W, i), 0, 2);
        add([&](const auto& matrix, int64_t row) { return matrix.load(row, i); });
    }
    const int64_t rest = group.columns - i;
    if (rest) add([&](const auto& matrix, int64_t row) { return matrix.load(row, i, rest); });
    return totals(sums);
}

// y[r][first + p] for ROWS rows of x and the weight rows first to last − 1, at most W; y begins at `first`.
template <int ROWS, typename Out, typename Weights>
inline void tile(const Weights& weights, int64_t first, int64_t last, const Group& group,
                 const typename Out::Element* bias, typename Out::Element* y, int64_t stride) {
    constexpr int WIDE = W / ROWS;
    for (int64_t p = first; p < last; p += WIDE) {
        float sums[ROWS][WIDE];
        store(sums, products<ROWS>(weights, p, last, group));
        for (int r = 0; r < ROWS; ++r)
            for (int64_t j = 0; j < smaller(WIDE, last - p); ++j) {
                const int64_t column = p - first + j;
                Out::put(y + r * stride + column, sums[r][j] + (bias ? Out::get(bias + column) : 0));
            }
    }
}

// y = x · weightsᵀ + bias for the weight rows first to last − 1, at most W; bias and y begin at `first`.
template <typename Out, typename Weights>
inline void multiply_panel(const Weights& weights, int64_t first, int64_t last, const float* x, int64_t rows, int64_t columns,
                           const typename Out::Element* bias, typename Out::Element* y, int64_t stride) {
    const int groups = int((rows + TOGETHER - 1) / TOGETHER);
    for (int64_t r = 0, count; r < rows; r += count) {
        const Group group{x + r * columns, columns, int(r / TOGETHER), groups};
        const int64_t left = rows - r;
        if (left >= TOGETHER) tile<TOGETHER, Out>(weights, first, last, group, bias, y + r * stride, stride), count = TOGETHER;
        else if (left >= 2) tile<2, Out>(weights, first, last, group, bias, y + r * stride, stride), count = 2;
        else tile<1, Out>(weights, first, last, group, bias, y + r * stride, stride), count = 1;
    }
}

// W weight rows at a time become floats in memory before they meet more rows of x than TOGETHER, so that each does so once.
template <typename Out, typename Weights>
void multiply(const Weights& weights, int64_t outputs, const float* x, int64_t rows, int64_t columns, int64_t group,
              const typename Out::Element* bias, typename Out::Element* y, int threads) {
    constexpr bool floats = std::is_same<Weights, Plain<Float32>>::value;
    parallel((outputs + W - 1) / W, worth(threads, outputs * columns, 1 << 18), [&](int64_t from, int64_t to) {
        const bool unpacked = !floats && rows > TOGETHER;
        std::unique_ptr<float[]> room(unpacked ? new float[size_t(W * columns)] : nullptr);
        for (int64_t first = from * W; first < smaller(to * W, outputs); first += W) {
            const int64_t last = smaller(first + W, outputs), base = group * outputs;
            const typename Out::Element* b = bias ? bias + base + first : nullptr;
            if (unpacked) {
                for (int64_t row = first; row < last; ++row)
                    vectors(columns, [&](int64_t i, int64_t n) {
                        const Floats values = n == W ? weights.load(base + row, i) : weights.load(base + row, i, n);
                        put<Float32>(room.get() + (row - first) * columns + i, values, n);
                    });
                multiply_panel<Out>(Plain<Float32>{room.get(), columns}, 0, last - first, x, rows, columns, b, y + first,
                                    outputs);
            } else {
                multiply_panel<Out>(weights, base + first, base + last, x, rows, columns, b, y + first, outputs);
            }
        }
    });
}

}  // namespace
