// How attention multiplies 16 queries (a tile) by 16 keys (a panel) at a time: in fp32, whatever the inputs' dtype, and
// bf16 inputs in bf16 where the processor can (amx.h). One factor is read a number at a time, the other by vectors; each
// number is used for VECTORS of them, as two loads a cycle would not feed two multipliers otherwise.
#pragma once

#include "tiles.h"

namespace {

constexpr int PARTS = TILE / W;  // vectors of a panel's keys
constexpr int ROWS = 4;          // of the result, at a time, by VECTORS vectors: half of the registers

typedef Floats Sums[ROWS][VECTORS];

// sums[r][v] += Σ_t number(r, t) · vector(v, t), for V vectors
template <int V, typename Number, typename Vector>
inline void multiply(int64_t count, const Number& number, const Vector& vector, Sums& sums) {
    for (int64_t t = 0; t < count; ++t) {
        Floats vectors[V];
        for (int v = 0; v < V; ++v) vectors[v] = load<Floats>(vector(v, t));
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            Floats factor = all(*number(r, t));
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[r][v] = fma(factor, vectors[v], sums[r][v]);
        }
    }
}

// out[i][d] += Σ_t a[i · ROW + t · STEP] · b[t][d]; b is panels of [TILE][size], one after the other in t.
template <int ROW, int STEP>
inline void accumulate(const float* a, const float* const* b, int panels, int64_t size, float* out) {
    by_vectors(size / W, [&](int64_t first, auto count) {
        constexpr int V = decltype(count)::value;
        for (int i = 0; i < TILE; i += ROWS) {
            float* into = out + i * size + first * W;
            Sums sums;
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < V; ++v) sums[r][v] = load<Floats>(into + r * size + v * W);
            for (int panel = 0; panel < panels; ++panel) {
                const float *numbers = a + i * ROW + panel * TILE * STEP, *vectors = b[panel] + first * W;
                multiply<V>(
                    TILE, [=](int r, int64_t t) { return numbers + r * ROW + t * STEP; },
                    [=](int v, int64_t t) { return vectors + t * size + v * W; }, sums);
            }
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < V; ++v) store(into + r * size + v * W, sums[r][v]);
        }
    });
}

template <typename Type>
struct Products {
    typedef typename Type::Element Element;
    typedef float Held;       // what factors are held in
    typedef Float32 Weights;  // how weights and gradients of scores are stored
    static constexpr bool AS_THEY_LIE = sizeof(Element) == sizeof(float);  // rows are factors without a copy

    struct Setup {};  // what a thread needs

    // TILE rows of a panel as factors for which rows are summed over.
    static void rows(const Element* from, int64_t size, float* into) {
        for (int64_t i = 0; i < TILE * size; i += W) store(into + i, Type::load(from + i));
    }

    // TILE rows of a panel as factors for which columns are summed over: [size][TILE].
    static void columns(const Element* from, int64_t size, float* into) {
        for (int64_t d = 0; d < size; d += W) {
            for (int part = 0; part < TILE; part += W) {
                Floats x[W];
                for (int i = 0; i < W; ++i) x[i] = Type::load(from + (part + i) * size + d);
                transpose(x);
                for (int i = 0; i < W; ++i) store(into + (d + i) * TILE + part, x[i]);
            }
        }
    }

    // A tile's rows as the left factor of scores, and as the right one of sums over queries.
    class Factor {
       public:
        void read(const Element* from, int64_t size) {
            if constexpr (AS_THEY_LIE)
                left_ = from;
            else
                rows(from, size, room_), left_ = room_;
        }
        const float* left() const { return left_; }
        const float* right(int64_t) const { return left_; }

       private:
        const float* left_;
        alignas(64) float room_[AS_THEY_LIE ? 1 : TILE * LARGEST];
    };

    // scores[i][j] = Σ_d queries[i][d] · keys[j][d]; the keys are columns(…) of panels.
    static void dots(const Factor& queries, const float* const* keys, int panels, int64_t size, float* scores) {
        by_vectors(panels * PARTS, [&](int64_t first, auto count) {
            constexpr int V = decltype(count)::value;
            const float* vectors[V];
            for (int v = 0; v < V; ++v) vectors[v] = keys[(first + v) / PARTS] + (first + v) % PARTS * W;
            for (int i = 0; i < TILE; i += ROWS) {
                Sums sums = {};
                const float* from = queries.left() + i * size;
                multiply<V>(
                    size, [=](int r, int64_t d) { return from + r * size + d; },
                    [&](int v, int64_t d) { return vectors[v] + d * TILE; }, sums);
                for (int r = 0; r < ROWS; ++r)
                    for (int v = 0; v < V; ++v) store(scores + (i + r) * SCORES + (first + v) * W, sums[r][v]);
            }
        });
    }

    // out[i][d] += Σ_j weights[i][j] · values[j][d]; the values are rows(…) of panels.
    static void add(const float* weights, const float* const* values, int panels, int64_t size, float* out) {
        accumulate<SCORES, 1>(weights, values, panels, size, out);
    }

    // out[at + j][d] += Σ_i weights[i][j] · right[i][d], for the keys j of panels that begin at `at`.
    static void add_to_keys(const float* weights, const int64_t* at, int panels, const float* right, int64_t size,
                            float* out) {
        for (int panel = 0; panel < panels; ++panel)
            accumulate<1, SCORES>(weights + panel * TILE, &right, 1, size, out + at[panel] * size);
    }
};

}  // namespace

#if defined(__AMX_BF16__)
#include "amx.h"
#endif
