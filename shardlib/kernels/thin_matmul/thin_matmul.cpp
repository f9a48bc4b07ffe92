// Products of a few rows with weights on the CPU; see op.py for the mathematics. Compiled once per instruction set.
#include "vectors.h"
#if defined(__AMX_BF16__)
#include "tiles.h"
#endif

namespace {

// The rows of x that meet the weights of each group, and what is written.
struct Rows {
    int64_t number, columns;
    const int64_t* ends;
    int64_t groups, outputs;
    const float* bias;
    int threads;

    // Runs body(group, first, count) for every group that has rows.
    template <typename Body>
    void each(const Body& body) const {
        for (int64_t group = 0, first = 0, end; group < groups; ++group, first = end) {
            end = ends ? ends[group] : number;
            if (end > first) body(group, first, end - first);
        }
    }
};

template <typename Out, typename Weights>
void by_vectors(const Rows& rows, const Weights& weights, const void* x, void* y) {
    rows.each([&](int64_t group, int64_t first, int64_t count) {
        multiply<Out>(weights, rows.outputs, static_cast<const float*>(x) + first * rows.columns, count, rows.columns, group,
                      rows.bias, static_cast<typename Out::Element*>(y) + first * rows.outputs, rows.threads);
    });
}

void by_bf16(const Rows& rows, const Plain<BFloat16>& weights, const void* x, void* y) {
#if defined(__AMX_BF16__)
    rows.each([&](int64_t group, int64_t first, int64_t count) {
        const int64_t panels = (count + LINES - 1) / LINES;
        std::unique_ptr<uint32_t[]> packed(new uint32_t[size_t(panels * tiles(rows.columns) * TILE)]);
        pack<false>({static_cast<const uint16_t*>(x) + first * rows.columns, rows.columns, true}, count, rows.columns,
                    packed.get());
        multiply_tiles(weights, rows.outputs, packed.get(), count, group, rows.bias,
                       static_cast<uint16_t*>(y) + first * rows.outputs, rows.threads);
    });
#else
    by_vectors<BFloat16>(rows, weights, x, y);
#endif
}

template <typename Out>
void by_blocks(const Rows& rows, const void* weights, int bits, const float* scales, int64_t block, const void* x, void* y) {
    const uint8_t* values = static_cast<const uint8_t*>(weights);
    if (bits == 8) by_vectors<Out>(rows, Blocks<8>{values, scales, rows.columns, block}, x, y);
    else by_vectors<Out>(rows, Blocks<4>{values, scales, rows.columns, block}, x, y);
}

}  // namespace

// x: [number][columns], floats, but bf16 for weights of bf16 on AMX. ends: [groups], or null for one group. weights: [groups][outputs][columns], of `bits` bits: 32 and
// 16 are fp32 and bf16, 8 and 4 integers with scales[… / block]. bias: [groups][outputs], or null. y: [rows][outputs], dtype 0
// float, 1 bfloat16.
EXPORT(thin_matmul)(const void* x, int64_t number, int64_t columns, const int64_t* ends, int64_t groups, const void* weights,
                    int bits, const float* scales, int64_t block, int64_t outputs, const float* bias, int dtype, void* y, int threads) {
    const Rows rows{number, columns, ends, groups, outputs, bias, threads};
    if (bits == 32) by_vectors<Float32>(rows, Plain<Float32>{static_cast<const float*>(weights), columns}, x, y);
    else if (bits == 16) by_bf16(rows, Plain<BFloat16>{static_cast<const uint16_t*>(weights), columns}, x, y);
    else if (dtype == 0) by_blocks<Float32>(rows, weights, bits, scales, block, x, y);
    else by_blocks<BFloat16>(rows, weights, bits, scales, block, x, y);
}
