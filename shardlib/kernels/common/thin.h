// Products of a few rows with weights as they lie in memory, and what layers of such products do between them.
#pragma once

#include <vector>

#include "thin_vectors.h"
#if defined(__AMX_BF16__)
#include "thin_tiles.h"
#endif

namespace {

// Weights [groups][outputs][columns], with biases [groups][outputs] of the dtype of rows, or null. Of 32 or 16
// bits they have that dtype too; of 8 and 4 they are integers with scales[… / block]. A line of numbers: `line` in thin_matmul.
struct Matrix {
    const void* values;
    int64_t bits;
    const float* scales;
    int64_t block, outputs, columns;
    const void* bias;
};
static_assert(sizeof(Matrix) == 7 * sizeof(int64_t), "a line of numbers");

// Rows of x as floats; fp32 ones are where they were.
template <typename Type>
struct Unpacked {
    std::vector<float> room;
    const float* at;

    Unpacked(const typename Type::Element* x, int64_t count) : room(size_t(count)), at(room.data()) {
        vectors(count, [&](int64_t i, int64_t n) { put<Float32>(room.data() + i, get<Type>(x + i, n), n); });
    }
};

template <>
struct Unpacked<Float32> {
    const float* at;

    Unpacked(const float* x, int64_t) : at(x) {}
};

#if defined(__AMX_BF16__)
inline void by_tiles(const Matrix& matrix, int64_t group, const uint16_t* x, int64_t rows, uint16_t* y, int threads) {
    const int64_t columns = matrix.columns, panels = (rows + LINES - 1) / LINES;
    std::unique_ptr<uint32_t[]> packed(new uint32_t[size_t(panels * tiles(columns) * TILE)]);
    pack<false>({x, columns, true}, rows, columns, packed.get());
    multiply_tiles(Plain<BFloat16>{static_cast<const uint16_t*>(matrix.values), columns}, matrix.outputs, packed.get(), rows,
                   group, static_cast<const uint16_t*>(matrix.bias), y, threads);
}
#endif

// y[rows][outputs] = x[rows][columns] · weightsᵀ + bias, of one group's weights.
template <typename Type>
void product(const Matrix& matrix, int64_t group, const typename Type::Element* x, int64_t rows, typename Type::Element* y,
             int threads) {
    const int64_t columns = matrix.columns;
#if defined(__AMX_BF16__)
    if constexpr (std::is_same<Type, BFloat16>::value)
        if (matrix.bits == 16) return by_tiles(matrix, group, x, rows, y, threads);
#endif
    const Unpacked<Type> floats(x, rows * columns);
    auto by_vectors = [&](const auto& weights) {
        multiply<Type>(weights, matrix.outputs, floats.at, rows, columns, group,
                       static_cast<const typename Type::Element*>(matrix.bias), y, threads);
    };
    const uint8_t* values = static_cast<const uint8_t*>(matrix.values);
    if (matrix.bits >= 16) by_vectors(Plain<Type>{static_cast<const typename Type::Element*>(matrix.values), columns});
    else if (matrix.bits == 8) by_vectors(Blocks<8>{values, matrix.scales, columns, matrix.block});
    else by_vectors(Blocks<4>{values, matrix.scales, columns, matrix.block});
}

// y = weight · x / √(mean of x² + eps), of each row; y may be x.
template <typename Type>
void rms_norm(const typename Type::Element* x, const void* weight_, float eps, int64_t rows, int64_t columns,
              typename Type::Element* y) {
    const typename Type::Element* weight = static_cast<const typename Type::Element*>(weight_);
    for (int64_t row = 0; row < rows; ++row, x += columns, y += columns) {
        Floats squares = {};
        vectors(columns, [&](int64_t i, int64_t n) { squares = fma(get<Type>(x + i, n), get<Type>(x + i, n), squares); });
        const float scale = 1.0f / __builtin_sqrtf(sum(squares) / float(columns) + eps);
        vectors(columns, [&](int64_t i, int64_t n) {
            put<Type>(y + i, get<Type>(x + i, n) * all(scale) * get<Type>(weight + i, n), n);
        });
    }
}

template <typename Type>
void add(const typename Type::Element* x, const typename Type::Element* y, int64_t count, typename Type::Element* sums) {
    vectors(count, [&](int64_t i, int64_t n) { put<Type>(sums + i, get<Type>(x + i, n) + get<Type>(y + i, n), n); });
}

}  // namespace
