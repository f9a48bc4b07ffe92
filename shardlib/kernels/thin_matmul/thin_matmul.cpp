// Products of a few rows with weights on the CPU; see op.py for the mathematics. Compiled once per instruction set.
#include "../common/thin.h"

namespace {

template <typename Type>
void multiply_rows(const void* x, int64_t rows, const Matrix& matrix, void* y, int threads) {
    typedef typename Type::Element Element;
    product<Type>(matrix, 0, static_cast<const Element*>(x), rows, static_cast<Element*>(y), threads);
}

}  // namespace

// dtype, of x, y and the bias: 0 float, 1 bfloat16.
EXPORT(thin_matmul)(const void* x, int dtype, int64_t rows, const Matrix* matrix, void* y, int threads) {
    BY_TYPE(dtype, multiply_rows, x, rows, *matrix, y, threads);
}
