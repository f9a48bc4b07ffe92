// Lion on the CPU; see op.py for the mathematics. Compiled once per instruction set (ISA names it).
#include "../common/elementwise.h"

namespace {

template <typename Kept, typename Grad, typename Copy>
struct Lion {
    typename Kept::Element* param;
    const typename Grad::Element* grad;
    typename Kept::Element* mu;
    typename Copy::Element* copy;
    float b1, rest1, b2, rest2, decay, size, scale;

    template <typename Lanes>
    void at(int64_t i) const {
        auto g = Lanes::template get<Grad>(grad + i) * scale;
        auto m = Lanes::template get<Kept>(mu + i);
        auto c = m * b1 + g * rest1;
        decltype(c) zero{};
        auto by = c > 0.0f ? zero + size : c < 0.0f ? zero - size : c - c;  // NaN stays
        auto p = Lanes::template get<Kept>(param + i) * decay - by;
        Lanes::template put<Kept>(mu + i, m * b2 + g * rest2);
        Lanes::template put<Kept>(param + i, p);
        Lanes::template stream<Copy>(copy + i, p);
    }
};

}  // namespace

// dtypes: 0 float, 1 bfloat16, 2 half; of the copy -1 for none.
EXPORT(lion_step)(void* param, int dtype, const void* grad, int grad_dtype, void* mu, uint16_t* copy, int copy_dtype,
                  int64_t count, float b1, float rest1, float b2, float rest2, float decay, float size, float scale,
                  int threads) {
    with_type(dtype, [&](auto kept) {
        with_type(grad_dtype, [&](auto read) {
            with_copy(copy_dtype, [&](auto narrow) {
                typedef decltype(kept) Kept;
                typedef decltype(read) Grad;
                typedef typename Kept::Element Element;
                Lion<Kept, Grad, decltype(narrow)> op = {
                    static_cast<Element*>(param), static_cast<const typename Grad::Element*>(grad),
                    static_cast<Element*>(mu), copy, b1, rest1, b2, rest2, decay, size, scale};
                sweep(op, count, copy, threads);
            });
        });
    });
}
