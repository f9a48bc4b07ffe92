// Products of bf16 by expert on the CPU; see __init__.py for the mathematics. AMX tiles alone serve them (ISA names the instruction
// set that this is compiled for): elsewhere torch's own products do.
#if defined(__AMX_BF16__)
#include "product.h"

namespace {

// The rows of each expert.
struct Rows {
    const int64_t* ends;
    int64_t experts;

    int64_t first(int64_t expert) const { return expert ? ends[expert - 1] : 0; }
    int64_t count(int64_t expert) const { return ends[expert] - first(expert); }
};

// Matrices [experts][outer][inner], of which either dimension may lie side by side.
struct Matrices {
    const uint16_t* at;
    int64_t apart, stride;
    bool inner_along;

    // Its lines are outer (sums over inner), or inner (sums over outer).
    Factor outer(int64_t expert) const { return {at + expert * apart, stride, inner_along}; }
    Factor inner(int64_t expert) const { return {at + expert * apart, stride, !inner_along}; }
};

inline void clear(uint16_t* out, int64_t first, int64_t last, int64_t columns) {
    memset(out + first * columns, 0, size_t((last - first) * columns) * sizeof(*out));
}

}  // namespace

// x: [rows][inner], its rows x_stride apart; ends: [experts]; bias: [experts][outer] or null; y: [rows][outer];
// scratch: [threads][ROOM].
EXPORT(grouped_matmul)(const uint16_t* x, int64_t x_stride, const uint16_t* weight, int64_t apart, int64_t stride,
                       int inner_along, const int64_t* ends, int64_t experts, int64_t rows, int64_t inner, int64_t outer,
                       const uint16_t* bias, uint16_t* y, uint32_t* scratch, int threads) {
    const Rows of{ends, experts};
    const Matrices matrices{weight, apart, stride, inner_along != 0};
    multiply_all(experts, scratch, threads, [&](int64_t expert) {
        const int64_t first = of.first(expert);
        return Product{{x + first * x_stride, x_stride, true}, matrices.outer(expert), of.count(expert), outer, inner,
                       y + first * outer, bias ? bias + expert * outer : nullptr};
    });
    clear(y, ends[experts - 1], rows, outer);
}

// dy: [rows][outer], contiguous; dx: [rows][inner]; dweight: [experts][outer][inner].
EXPORT(grouped_matmul_backward)(const uint16_t* dy, const uint16_t* x, int64_t x_stride, const uint16_t* weight,
                                int64_t apart, int64_t stride, int inner_along, const int64_t* ends, int64_t experts,
                                int64_t rows, int64_t inner, int64_t outer, uint16_t* dx, uint16_t* dweight,
                                uint32_t* scratch, int threads) {
    const Rows of{ends, experts};
    const Matrices matrices{weight, apart, stride, inner_along != 0};
    multiply_all(experts, scratch, threads, [&](int64_t expert) {
        const int64_t first = of.first(expert);
        return Product{{dy + first * outer, outer, true}, matrices.inner(expert), of.count(expert), inner, outer,
                       dx + first * inner};
    });
    clear(dx, ends[experts - 1], rows, inner);
    multiply_all(experts, scratch, threads, [&](int64_t expert) {
        const int64_t first = of.first(expert);
        return Product{{dy + first * outer, outer, false}, {x + first * x_stride, x_stride, false}, outer, inner,
                       of.count(expert), dweight + expert * outer * inner};
    });
}

// The numbers of 32 bits that a thread works in.
EXPORT(grouped_matmul_room)(int64_t* room) { *room = ROOM; }
#endif

#if defined(CHOOSES)
#include "../common/simd.h"
#endif
