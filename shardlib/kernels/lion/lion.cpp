// Lion on the CPU; see __init__.py for the mathematics. Compiled once per instruction set (ISA names it).
#include "../common/elementwise.h"

namespace {

template <typename Kept, typename Grad, typename Copy, bool elsewhere>
struct Lion {
    State<Kept> param;
    const typename Grad::Element* grad;
    State<Kept> mu;
    typename Copy::Element* copy;
    float b1, rest1, b2, rest2, decay, size, scale;

    template <typename Lanes>
    void at(int64_t i) const {
        auto g = Lanes::template get<Grad>(grad + i) * scale;
        auto m = mu.template get<Lanes>(i);
        auto c = m * b1 + g * rest1;
        decltype(c) zero{};
        auto by = c > 0.0f ? zero + size : c < 0.0f ? zero - size : c - c;  // NaN stays
        auto p = param.template get<Lanes>(i) * decay - by;
        mu.template put<Lanes, elsewhere>(i, m * b2 + g * rest2);
        param.template put<Lanes, elsewhere>(i, p);
        Lanes::template stream<Copy>(copy + i, p);
    }
};

}  // namespace

// States are read at `from_` and written at the others, which may be the same.
EXPORT(lion)(const void* from_param, const void* from_mu, void* param, int dtype, const void* grad, int grad_dtype,
             void* mu, uint16_t* copy, int copy_dtype, int64_t count, float b1, float rest1, float b2, float rest2,
             float decay, float size, float scale, int threads) {
    with_types(dtype, grad_dtype, copy_dtype, [&](auto kept, auto read, auto narrow) {
        typedef decltype(kept) Kept;
        typedef decltype(read) Grad;
        State<Kept> p(from_param, param), m(from_mu, mu);
        with_states(copy, [&](auto elsewhere) {
            Lion<Kept, Grad, decltype(narrow), decltype(elsewhere)::value> op = {
                p, static_cast<const typename Grad::Element*>(grad), m, copy,
                b1, rest1, b2, rest2, decay, size, scale};
            sweep(op, count, copy, threads);
        }, p, m);
    });
}
