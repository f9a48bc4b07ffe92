// Products of a few rows with weights on the CPU; see __init__.py for the mathematics. Compiled once per instruction set.
#include "../common/thin.h"

namespace {

template <typename Type>
void multiply_rows(const void* x_, int64_t rows, const int64_t* ends, int64_t groups, const Matrix& matrix, void* y_,
                   int threads) {
    typedef typename Type::Element Element;
    const Element* x = static_cast<const Element*>(x_);
    Element* y = static_cast<Element*>(y_);
    for (int64_t group = 0, first = 0, end; group < groups; ++group, first = end) {
        end = ends ? ends[group] : rows;
        if (end > first)
            product<Type>(matrix, group, x + first * matrix.columns, end - first, y + first * matrix.outputs, threads);
    }
}

}  // namespace

// dtype, of x, y and biases: 0 float, 1 bfloat16. ends: [groups], of each group's rows, or null for one group.
EXPORT(thin_matmul)(const void* x, int dtype, int64_t rows, const int64_t* ends, int64_t groups, const Matrix* matrix, void* y,
                    int threads) {
    BY_TYPE(dtype, multiply_rows, x, rows, ends, groups, *matrix, y, threads);
}
