// Products of rows with a quantised matrix on the CPU; see op.py for the mathematics. Compiled once per instruction set.
//
// The matrix passes once, a panel of 4 rows and up to CHUNK columns at a time, which becomes floats in the first-level cache
// and meets all rows of x there. A result is a sum over lanes, chunk by chunk, in an order that depends on its own row and
// column alone: it has the same bits among any other rows.
#include "../common/packed.h"
#include "../common/rows.h"

namespace {

constexpr int64_t CHUNK = 1024;  // columns
constexpr int64_t MOST = 64;     // rows of x at a time, as in cpu.py
constexpr int PANEL = 4, TILE = 4;

inline float total(Floats values) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(bitcast<__m512>(values));
#else
    return sum(values);
#endif
}

// Columns [a, b) of a row as floats. Rows are whole blocks, and blocks are whole vectors.
template <int BITS>
inline void dequantize(const uint8_t* values, const float* scales, int64_t columns, int64_t block, int64_t row, int64_t a,
                       int64_t b, float* to) {
    for (int64_t from = a, end; from < b; from = end) {
        end = smaller(b, (from / block + 1) * block);
        const Floats scale = all(scales[(row * columns + from) / block]);
        for (int64_t i = from; i < end; i += W)
            store(to + (i - a),
                  __builtin_convertvector(Packed<BITS>::load(values, row * columns + i), Floats) * scale);
    }
}

// Adds the products of ROWS rows of x with the panel's rows, over `count` columns, to totals[r][p].
template <int ROWS>
inline void tile(const float (*panel)[CHUNK], const float* x, int64_t columns, int64_t count, float (*totals)[PANEL]) {
    Floats sums[PANEL][ROWS] = {};
    for (int64_t i = 0; i < count; i += W) {
        Floats v[ROWS];
        for (int r = 0; r < ROWS; ++r) v[r] = load<Floats>(x + r * columns + i);
        for (int p = 0; p < PANEL; ++p) {
            const Floats w = load<Floats>(panel[p] + i);
            for (int r = 0; r < ROWS; ++r) sums[p][r] = fma(w, v[r], sums[p][r]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int p = 0; p < PANEL; ++p) totals[r][p] += total(sums[p][r]);
}

template <int BITS>
void product(const float* x, int64_t rows, int64_t columns, const uint8_t* values, const float* scales, int64_t block,
             int64_t outputs, const float* bias, float* y, int threads) {
    parallel((outputs + PANEL - 1) / PANEL, worth(threads, outputs * columns, 1 << 18), [&](int64_t from, int64_t to) {
        float panel[PANEL][CHUNK] = {};  // of rows that the last panel lacks the totals are not stored
        float totals[MOST][PANEL];
        for (int64_t first = from * PANEL; first < smaller(to * PANEL, outputs); first += PANEL) {
            const int held = int(smaller(PANEL, outputs - first));
            for (int64_t r = 0; r < rows; ++r)
                for (int p = 0; p < PANEL; ++p) totals[r][p] = bias && p < held ? bias[first + p] : 0;
            for (int64_t a = 0; a < columns; a += CHUNK) {
                const int64_t b = smaller(columns, a + CHUNK);
                for (int p = 0; p < held; ++p)
                    dequantize<BITS>(values, scales, columns, block, first + p, a, b, panel[p]);
                int64_t r = 0;
                for (; r + TILE <= rows; r += TILE) tile<TILE>(panel, x + r * columns + a, columns, b - a, totals + r);
                for (; r < rows; ++r) tile<1>(panel, x + r * columns + a, columns, b - a, totals + r);
            }
            for (int64_t r = 0; r < rows; ++r)
                for (int p = 0; p < held; ++p) y[r * outputs + first + p] = totals[r][p];
        }
    });
}

}  // namespace

// bias: null for none. rows: at most MOST.
EXPORT(quantized_matmul)(const float* x, int64_t rows, int64_t columns, const uint8_t* values, const float* scales,
                         int bits, int64_t block, int64_t outputs, const float* bias, float* y, int threads) {
    auto run = bits == 8 ? product<8> : product<4>;
    run(x, rows, columns, values, scales, block, outputs, bias, y, threads);
}
