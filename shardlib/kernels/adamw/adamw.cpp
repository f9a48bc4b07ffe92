// AdamW on the CPU; see __init__.py for the mathematics. Compiled once per instruction set (ISA names it).
#include "../common/elementwise.h"

namespace {

template <typename Kept, typename Grad, typename Copy, bool elsewhere>
struct AdamW {
    State<Kept> param;
    const typename Grad::Element* grad;
    State<Kept> mu, nu;
    typename Copy::Element* copy;
    float b1, rest1, b2, rest2, decay, size, root, eps, scale;

    template <typename Lanes>
    void at(int64_t i) const {
        auto g = Lanes::template get<Grad>(grad + i) * scale;
        auto m = mu.template get<Lanes>(i) * b1 + g * rest1;
        auto v = nu.template get<Lanes>(i) * b2 + g * g * rest2;
        auto p = param.template get<Lanes>(i) * decay - m * size / (Lanes::root(v) * root + eps);
        mu.template put<Lanes, elsewhere>(i, m);
        nu.template put<Lanes, elsewhere>(i, v);
        param.template put<Lanes, elsewhere>(i, p);
        Lanes::template stream<Copy>(copy + i, p);
    }
};

struct Direction {
    const float* param;
    float *grad, *mu, *nu;
    float b1, rest1, b2, rest2, weight_decay, size, root, eps, scale;

    template <typename Lanes>
    void at(int64_t i) const {
        auto g = Lanes::template get<Float32>(grad + i) * scale;
        auto m = Lanes::template get<Float32>(mu + i) * b1 + g * rest1;
        auto v = Lanes::template get<Float32>(nu + i) * b2 + g * g * rest2;
        auto u = m * size / (Lanes::root(v) * root + eps) + Lanes::template get<Float32>(param + i) * weight_decay;
        Lanes::template put<Float32>(mu + i, m);
        Lanes::template put<Float32>(nu + i, v);
        Lanes::template put<Float32>(grad + i, u);
    }
};

}  // namespace

EXPORT(adam_direction)(const float* param, float* grad, float* mu, float* nu, int64_t count, float b1, float rest1,
                       float b2, float rest2, float weight_decay, float size, float root, float eps, float scale,
                       int threads) {
    Direction op = {param, grad, mu, nu, b1, rest1, b2, rest2, weight_decay, size, root, eps, scale};
    sweep(op, count, nullptr, threads);
}

// States are read at `from_` and written at the others, which may be the same.
EXPORT(adamw)(const void* from_param, const void* from_mu, const void* from_nu, void* param, int dtype,
              const void* grad, int grad_dtype, void* mu, void* nu, uint16_t* copy, int copy_dtype, int64_t count,
              float b1, float rest1, float b2, float rest2, float decay, float size, float root, float eps,
              float scale, int threads) {
    with_types(dtype, grad_dtype, copy_dtype, [&](auto kept, auto read, auto narrow) {
        typedef decltype(kept) Kept;
        typedef decltype(read) Grad;
        State<Kept> p(from_param, param), m(from_mu, mu), v(from_nu, nu);
        with_states(copy, [&](auto elsewhere) {
            AdamW<Kept, Grad, decltype(narrow), decltype(elsewhere)::value> op = {
                p, static_cast<const typename Grad::Element*>(grad), m, v, copy,
                b1, rest1, b2, rest2, decay, size, root, eps, scale};
            sweep(op, count, copy, threads);
        }, p, m, v);
    });
}
