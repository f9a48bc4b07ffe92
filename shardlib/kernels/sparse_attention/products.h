// Products of 16 queries (a tile) and 16 keys (a panel) at a time: in fp32 whatever the inputs' dtype, except that amx.h
// multiplies bf16 inputs in bf16 where the processor can. One factor is read a number at a time, the other by vectors. Each
// number multiplies VECTORS vectors, as two loads a cycle would not keep two multipliers busy otherwise.
#pragma once

#include "tiles.h"

namespace {

constexpr int PANEL_VECTORS = TILE / W;  // vectors of a panel's keys
constexpr int ROWS = 4;  // of the result at a time; ROWS · VECTORS sums fill half of the registers

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

// out[i][d] += Σ_t a[i · ROW + t · STEP] · b[t][d]; b consists of panels of [TILE][size], one after the other in t.
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
    typedef float Held;       // the type of stored factors
    typedef Float32 Weights;  // the type of stored weights and gradients of scores
    static constexpr bool AS_THEY_LIE = sizeof(Element) == sizeof(float);  // rows are factors without a copy

    struct Setup {};  // the state that a thread needs for products

    // Copies TILE rows of a panel to a factor of products that sum over rows.
    static void rows(const Element* from, int64_t size, float* into) {
        for (int64_t i = 0; i < TILE * size; i += W) store(into + i, Type::load(from + i));
    }

    // Transposes TILE rows of a panel to [size][TILE], a factor of products that sum over columns.
    static void columns(const Element* from, int64_t size, float* into) {
        for (int64_t d = 0; d < size; d += W) {
            for (int first = 0; first < TILE; first += W) {
                Floats x[W];
                for (int i = 0; i < W; ++i) x[i] = Type::load(from + (first + i) * size + d);
                transpose(x);
                for (int i = 0; i < W; ++i) store(into + (d + i) * TILE + first, x[i]);
            }
        }
    }

    // The rows of a tile, as the left factor of scores and as the right factor of sums over queries.
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

    // scores[i][j] = Σ_d queries[i][d] · keys[j][d]; keys are panels transposed by columns().
    static void dots(const Factor& queries, const float* const* keys, int panels, int64_t size, float* scores) {
        by_vectors(panels * PANEL_VECTORS, [&](int64_t first, auto count) {
            constexpr int V = decltype(count)::value;
            const float* vectors[V];
            for (int v = 0; v < V; ++v) vectors[v] = keys[(first + v) / PANEL_VECTORS] + (first + v) % PANEL_VECTORS * W;
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

    // out[i][d] += Σ_j weights[i][j] · values[j][d]; values are panels copied by rows().
    static void add(const float* weights, const float* const* values, int panels, int64_t size, float* out) {
        accumulate<SCORES, 1>(weights, values, panels, size, out);
    }

    // out[at + j][d] += Σ_i weights[i][j] · right[i][d] for the keys j of the panels that begin at `at`.
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
