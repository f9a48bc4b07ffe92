// LayerNorm and RMSNorm on the CPU; see __init__.py for the mathematics. Compiled once per instruction set (ISA names it).
//
// A row is read several times but comes from memory once: it stays in the first- or second-level cache.
#include "../common/rows.h"

namespace {

template <typename Type>
inline float mean_of(const typename Type::Element* s, int64_t columns) {
    Floats sums = {};
    vectors(columns, [&](int64_t i, int64_t n) { sums += get<Type>(s + i, n); });
    return sum(sums) / float(columns);
}

// ρ, given Σ (s − μ)² by lanes.
inline float scale_of(Floats squares, int64_t columns, float eps) {
    return 1.0f / __builtin_sqrtf(sum(squares) / float(columns) + eps);
}

template <typename Type>
void forward(const void* x_, const void* residual_, const float* weight, const float* bias, float eps, int centred,
             int64_t rows, int64_t columns, void* y_, void* total_, int threads) {
    typedef typename Type::Element Element;
    each_row(rows, columns, threads, [&](int64_t row) {
        const Element* s = static_cast<const Element*>(x_) + row * columns;
        Element* y = static_cast<Element*>(y_) + row * columns;
        if (residual_) {
            const Element* residual = static_cast<const Element*>(residual_) + row * columns;
            Element* total = static_cast<Element*>(total_) + row * columns;
            vectors(columns, [&](int64_t i, int64_t n) {
                put<Type>(total + i, get<Type>(s + i, n) + get<Type>(residual + i, n), n);
            });
            s = total;
        }
        float mean = centred ? mean_of<Type>(s, columns) : 0;
        Floats squares = {};
        vectors(columns, [&](int64_t i, int64_t n) {
            Floats c = first(get<Type>(s + i, n) - mean, n);
            squares += c * c;
        });
        float scale = scale_of(squares, columns, eps);
        vectors(columns, [&](int64_t i, int64_t n) {
            Floats value = (get<Type>(s + i, n) - mean) * scale * get<Float32>(weight + i, n);
            if (bias) value += get<Float32>(bias + i, n);
            put<Type>(y + i, value, n);
        });
    });
}

// Sums over rows: the gradient of the weight, then that of the bias.
template <typename Type>
void backward(const void* total_, const float* weight, float eps, int centred, int64_t rows, int64_t columns,
              const void* dy_, const void* dtotal_, void* ds_, float* dweight, float* dbias, int threads) {
    typedef typename Type::Element Element;
    summed_rows(rows, columns, {dweight, dbias}, threads, [&](int64_t row, float* sums) {
        const Element* s = static_cast<const Element*>(total_) + row * columns;
        const Element* dy = static_cast<const Element*>(dy_) + row * columns;
        Element* ds = static_cast<Element*>(ds_) + row * columns;
        float mean = centred ? mean_of<Type>(s, columns) : 0;
        Floats squares = {}, gs = {}, products = {};
        vectors(columns, [&](int64_t i, int64_t n) {
            Floats c = first(get<Type>(s + i, n) - mean, n);
            Floats g = get<Type>(dy + i, n) * get<Float32>(weight + i, n);
            squares += c * c;
            gs += g;
            products += g * c;
        });
        float scale = scale_of(squares, columns, eps);
        float shift = centred ? sum(gs) / float(columns) : 0, product = sum(products) * scale / float(columns);
        vectors(columns, [&](int64_t i, int64_t n) {
            Floats normed = (get<Type>(s + i, n) - mean) * scale, d = get<Type>(dy + i, n);
            put<Float32>(sums + i, get<Float32>(sums + i, n) + d * normed, n);
            put<Float32>(sums + columns + i, get<Float32>(sums + columns + i, n) + d, n);
            Floats grad = (d * get<Float32>(weight + i, n) - shift - normed * product) * scale;
            if (dtotal_) grad += get<Type>(static_cast<const Element*>(dtotal_) + row * columns + i, n);
            put<Type>(ds + i, grad, n);
        });
    });
}

}  // namespace

// dtype: 0 float, 1 bfloat16. residual, total and bias: null for none.
EXPORT(norm)(const void* x, const void* residual, int dtype, const float* weight, const float* bias, float eps,
             int centred, int64_t rows, int64_t columns, void* y, void* total, int threads) {
    BY_TYPE(dtype, forward, x, residual, weight, bias, eps, centred, rows, columns, y, total, threads);
}

// dtotal, dbias: null for none.
EXPORT(norm_backward)(const void* total, int dtype, const float* weight, float eps, int centred, int64_t rows,
                      int64_t columns, const void* dy, const void* dtotal, void* ds, float* dweight, float* dbias,
                      int threads) {
    BY_TYPE(dtype, backward, total, weight, eps, centred, rows, columns, dy, dtotal, ds, dweight, dbias, threads);
}
