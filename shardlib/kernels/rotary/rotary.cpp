// Rotary position embedding on the CPU; see __init__.py for the mathematics. Compiled once per instruction set (ISA names it).
#include "../common/rows.h"

namespace {

// Exchanges the two elements of each pair of neighbours.
inline Floats exchanged(Floats x) {
    Ints order;
    for (int i = 0; i < W; ++i) order[i] = i ^ 1;
    return __builtin_shuffle(x, order);
}

template <typename Type>
void turn(const void* x_, const float* cos, const float* sin, int interleaved, int back, int64_t rows, int64_t size,
          int64_t positions, int64_t half, void* y_, int threads) {
    typedef typename Type::Element Element;
    const float sign = back ? -1.0f : 1.0f;
    Floats signs;
    for (int i = 0; i < W; ++i) signs[i] = i % 2 ? sign : -sign;
    each_row(rows, size, threads, [&](int64_t row) {
        const Element* x = static_cast<const Element*>(x_) + row * size;
        Element* y = static_cast<Element*>(y_) + row * size;
        const int64_t width = interleaved ? 2 * half : half;
        const float *c = cos + row % positions * width, *s = sin + row % positions * width;
        if (interleaved)
            vectors(2 * half, [&](int64_t i, int64_t n) {
                Floats value = get<Type>(x + i, n);
                put<Type>(y + i, value * get<Float32>(c + i, n) + exchanged(value) * (get<Float32>(s + i, n) * signs), n);
            });
        else
            vectors(half, [&](int64_t i, int64_t n) {
                Floats a = get<Type>(x + i, n), b = get<Type>(x + half + i, n);
                Floats cosine = get<Float32>(c + i, n), sine = get<Float32>(s + i, n) * sign;
                put<Type>(y + i, a * cosine - b * sine, n);
                put<Type>(y + half + i, a * sine + b * cosine, n);
            });
        memcpy(y + 2 * half, x + 2 * half, size_t(size - 2 * half) * sizeof(Element));
    });
}

}  // namespace

// dtype: 0 float, 1 bfloat16. cos, sin: [positions][half], or interleaved [positions][2 · half], each number twice.
EXPORT(rotary)(const void* x, int dtype, const float* cos, const float* sin, int interleaved, int back, int64_t rows,
               int64_t size, int64_t positions, int64_t half, void* y, int threads) {
    BY_TYPE(dtype, turn, x, cos, sin, interleaved, back, rows, size, positions, half, y, threads);
}
