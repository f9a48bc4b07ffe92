// The first half of a decoder's layer, for one new token of each sequence, on the CPU; see __init__.py. Compiled once per
// instruction set.
#include "../common/attend.h"
#include "../common/thin.h"

namespace {

// In the order of `Heads.linears` in __init__.py.
struct Layer {
    Matrix q, k, v, o;
};

// Weights of norms, null where there is none.
struct Norms {
    const void *x, *q, *k;
    float eps;
};

// A cache, [.][kv_heads][room][size], and the rows and lengths that sequences have there.
struct Cache {
    void *keys, *values;
    const int64_t *rows, *starts;
    int64_t kv_heads, room, size, window;
};

// Turns the pairs (j, j + half) of each of a token's heads by its angles, cos and sin [tokens][half].
template <typename Type>
void rotate(typename Type::Element* x, int64_t tokens, int64_t heads, int64_t half, const typename Type::Element* cos,
            const typename Type::Element* sin) {
    for (int64_t token = 0; token < tokens; ++token, cos += half, sin += half)
        for (int64_t head = 0; head < heads; ++head, x += 2 * half)
            vectors(half, [&](int64_t i, int64_t n) {
                const Floats a = get<Type>(x + i, n), b = get<Type>(x + half + i, n);
                const Floats c = get<Type>(cos + i, n), s = get<Type>(sin + i, n);
                put<Type>(x + i, a * c - b * s, n);
                put<Type>(x + half + i, b * c + a * s, n);
            });
}

template <typename Type>
void layer_of(const void* x_, int64_t tokens, const Layer& layer, const Norms& norms, const void* cos_, const void* sin_,
              const Cache& cache, void* y_, int threads) {
    typedef typename Type::Element Element;
    const Element *x = static_cast<const Element*>(x_), *cos = static_cast<const Element*>(cos_),
                  *sin = static_cast<const Element*>(sin_);
    const int64_t width = layer.o.outputs, heads = layer.q.outputs / cache.size, own = cache.kv_heads;
    std::vector<Element> normed(size_t(tokens * width)), q(size_t(tokens * layer.q.outputs)), attended(q.size());
    std::vector<Element> k(size_t(tokens * layer.k.outputs)), v(k.size());
    const std::unique_ptr<float[]> scores(new float[size_t(tokens * heads * cache.room)]);
    rms_norm<Type>(x, norms.x, norms.eps, tokens, width, normed.data());
    product<Type>(layer.q, 0, normed.data(), tokens, q.data(), threads);
    product<Type>(layer.k, 0, normed.data(), tokens, k.data(), threads);
    product<Type>(layer.v, 0, normed.data(), tokens, v.data(), threads);
    if (norms.q) rms_norm<Type>(q.data(), norms.q, norms.eps, tokens * heads, cache.size, q.data());
    if (norms.k) rms_norm<Type>(k.data(), norms.k, norms.eps, tokens * own, cache.size, k.data());
    rotate<Type>(q.data(), tokens, heads, cache.size / 2, cos, sin);
    rotate<Type>(k.data(), tokens, own, cache.size / 2, cos, sin);
    attend<Type>(q.data(), k.data(), v.data(), cache.keys, cache.values, cache.rows, cache.starts, tokens, heads, own,
                 cache.room, cache.size, cache.window, scores.get(), attended.data(), threads);
    Element* y = static_cast<Element*>(y_);
    product<Type>(layer.o, 0, attended.data(), tokens, y, threads);
    add<Type>(x, y, tokens * width, y);
}

}  // namespace

// x, y: [tokens][width]; all of dtype 0 float or 1 bfloat16, but rows and starts and quantised weights.
EXPORT(decoder_attention)(const void* x, int dtype, int64_t tokens, const Layer* layer, const void* norm, const void* q_norm,
                          const void* k_norm, float eps, const void* cos, const void* sin, void* keys, void* values,
                          const int64_t* rows, const int64_t* starts, int64_t kv_heads, int64_t room, int64_t size,
                          int64_t window, void* y, int threads) {
    const Norms norms{norm, q_norm, k_norm, eps};
    const Cache cache{keys, values, rows, starts, kv_heads, room, size, window};
    BY_TYPE(dtype, layer_of, x, tokens, *layer, norms, cos, sin, cache, y, threads);
}
