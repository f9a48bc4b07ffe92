// SwiGLU on the CPU; see __init__.py for the mathematics. Compiled once per instruction set (ISA names it).
#include "../common/rows.h"
#include "../common/simd_math.h"

namespace {

// Rows at a distance of `stride` elements.
template <typename Type>
struct Rows {
    const typename Type::Element* at;
    int64_t stride;

    Rows(const void* from, int64_t stride) : at(static_cast<const typename Type::Element*>(from)), stride(stride) {}
    Floats operator()(int64_t row, int64_t i, int64_t n) const { return get<Type>(at + row * stride + i, n); }
};

template <typename Type>
void forward(Rows<Type> gate, Rows<Type> up, int64_t rows, int64_t columns, void* y, int threads) {
    each_row(rows, columns, threads, [&](int64_t row) {
        vectors(columns, [&](int64_t i, int64_t n) {
            Floats g = gate(row, i, n);
            put<Type>(static_cast<typename Type::Element*>(y) + row * columns + i, g * sigmoid(g) * up(row, i, n), n);
        });
    });
}

template <typename Type>
void backward(Rows<Type> gate, Rows<Type> up, Rows<Type> dy, int64_t rows, int64_t columns, void* dgate_, void* dup_,
              int threads) {
    auto *dgate = static_cast<typename Type::Element*>(dgate_), *dup = static_cast<typename Type::Element*>(dup_);
    each_row(rows, columns, threads, [&](int64_t row) {
        vectors(columns, [&](int64_t i, int64_t n) {
            Floats g = gate(row, i, n), s = sigmoid(g), d = dy(row, i, n);
            put<Type>(dgate + row * columns + i, d * up(row, i, n) * s * (1.0f + g * (1.0f - s)), n);
            put<Type>(dup + row * columns + i, d * g * s, n);
        });
    });
}

}  // namespace

// strides: elements from a row to the next. dtype: 0 float, 1 bfloat16.
EXPORT(swiglu)(const void* gate, int64_t gate_stride, const void* up, int64_t up_stride, int dtype, int64_t rows,
               int64_t columns, void* y, int threads) {
    if (dtype == 0)
        forward<Float32>({gate, gate_stride}, {up, up_stride}, rows, columns, y, threads);
    else
        forward<BFloat16>({gate, gate_stride}, {up, up_stride}, rows, columns, y, threads);
}

EXPORT(swiglu_backward)(const void* gate, int64_t gate_stride, const void* up, int64_t up_stride, int dtype,
                        const void* dy, int64_t rows, int64_t columns, void* dgate, void* dup, int threads) {
    if (dtype == 0)
        backward<Float32>({gate, gate_stride}, {up, up_stride}, {dy, columns}, rows, columns, dgate, dup, threads);
    else
        backward<BFloat16>({gate, gate_stride}, {up, up_stride}, {dy, columns}, rows, columns, dgate, dup, threads);
}
