// Bias + GeLU on the CPU; see __init__.py for the mathematics. Compiled once per instruction set (ISA names it).
#include "../common/rows.h"
#include "../common/simd_math.h"

namespace {

const float CUBIC = 0.044715f, TWICE = 1.59576912f;  // 2·√(2/π)

inline Floats value(Floats z, bool tanh) {
    return z * (tanh ? sigmoid(TWICE * (z + CUBIC * (z * z * z))) : normal(z).below);
}

inline Floats slope(Floats z, bool tanh) {
    if (!tanh) {
        Normal at = normal(z);
        return at.below + z * at.density * 0.398942280f;  // 1/√(2π)
    }
    Floats s = sigmoid(TWICE * (z + CUBIC * (z * z * z)));
    return s + z * s * (1.0f - s) * TWICE * (1.0f + 3 * CUBIC * (z * z));
}

template <typename Type>
void forward(const void* x_, const float* bias, int tanh, int64_t rows, int64_t columns, void* y_, int threads) {
    typedef typename Type::Element Element;
    const Element* x = static_cast<const Element*>(x_);
    Element* y = static_cast<Element*>(y_);
    each_row(rows, columns, threads, [&](int64_t row) {
        vectors(columns, [&](int64_t i, int64_t n) {
            Floats z = get<Type>(x + row * columns + i, n);
            if (bias) z += get<Float32>(bias + i, n);
            put<Type>(y + row * columns + i, value(z, tanh), n);
        });
    });
}

template <typename Type>
void backward(const void* x_, const float* bias, int tanh, const void* dy_, int64_t rows, int64_t columns, void* dx_,
              float* dbias, int threads) {
    typedef typename Type::Element Element;
    const Element *x = static_cast<const Element*>(x_), *dy = static_cast<const Element*>(dy_);
    Element* dx = static_cast<Element*>(dx_);
    auto gradient = [&](int64_t at, int64_t i, int64_t n) {
        Floats z = get<Type>(x + at, n);
        if (bias) z += get<Float32>(bias + i, n);
        Floats dz = get<Type>(dy + at, n) * slope(z, tanh);
        put<Type>(dx + at, dz, n);
        return dz;
    };
    if (!bias)
        return each_row(rows, columns, threads, [&](int64_t row) {
            vectors(columns, [&](int64_t i, int64_t n) { gradient(row * columns + i, i, n); });
        });
    summed_rows(rows, columns, {dbias}, threads, [&](int64_t row, float* sums) {
        vectors(columns, [&](int64_t i, int64_t n) {
            put<Float32>(sums + i, get<Float32>(sums + i, n) + gradient(row * columns + i, i, n), n);
        });
    });
}

}  // namespace

// dtype: 0 float, 1 bfloat16. bias: null for none.
EXPORT(gelu)(const void* x, int dtype, const float* bias, int tanh, int64_t rows, int64_t columns, void* y, int threads) {
    BY_TYPE(dtype, forward, x, bias, tanh, rows, columns, y, threads);
}

EXPORT(gelu_backward)(const void* x, int dtype, const float* bias, int tanh, const void* dy, int64_t rows,
                      int64_t columns, void* dx, float* dbias, int threads) {
    BY_TYPE(dtype, backward, x, bias, tanh, dy, rows, columns, dx, dbias, threads);
}
