// Adam's steps with a frozen variance on the CPU; see __init__.py for the mathematics. Compiled once per instruction set (ISA
// names it).
#include "../common/elementwise.h"

namespace {

// m̄: m where v is not zero, else zero, or NaN if m is not finite.
template <typename Values>
inline Values masked(Values m, Values v) {
    return v == 0.0f ? m - m : m;
}

struct LocalMomentum {
    float* grad;
    const float* mu;
    float b1, rest1, scale;

    template <typename Lanes>
    void at(int64_t i) const {
        auto g = Lanes::template get<Float32>(grad + i) * scale;
        Lanes::template put<Float32>(grad + i, Lanes::template get<Float32>(mu + i) * b1 + g * rest1);
    }
};

template <typename Copy>
struct FrozenStep {
    float *param, *mu;
    const float* nu;
    typename Copy::Element* copy;
    float size, eps, weight_decay;

    template <typename Lanes>
    void at(int64_t i) const {
        auto v = Lanes::template get<Float32>(nu + i);
        auto m = masked(Lanes::template get<Float32>(mu + i), v);
        auto p = Lanes::template get<Float32>(param + i);
        p += (m / (Lanes::root(v) + eps) + p * weight_decay) * size;
        Lanes::template put<Float32>(mu + i, m);
        Lanes::template put<Float32>(param + i, p);
        Lanes::template stream<Copy>(copy + i, p);
    }
};

struct LocalStep {
    const float* grad;
    float* mu;
    const float* nu;
    float* moved;
    float size, b1, rest1, eps, scale;

    template <typename Lanes>
    void at(int64_t i) const {
        auto g = Lanes::template get<Float32>(grad + i) * scale;
        auto v = Lanes::template get<Float32>(nu + i);
        auto m = masked(Lanes::template get<Float32>(mu + i) * b1 + g * rest1, v);
        auto u = Lanes::template get<Float32>(moved + i) + m / (Lanes::root(v) + eps) * size;
        Lanes::template put<Float32>(mu + i, m);
        Lanes::template put<Float32>(moved + i, u);
    }
};

struct FreshStep {
    float *mu, *before;
    const float* nu;
    float* fresh;
    float b1, rest1, b2, rest2, eps, spread;

    template <typename Lanes>
    void at(int64_t i) const {
        auto v = Lanes::template get<Float32>(nu + i);
        auto m = masked(Lanes::template get<Float32>(mu + i) / spread, v);
        auto g = (m - Lanes::template get<Float32>(before + i) * b1) / rest1;
        auto f = Lanes::template get<Float32>(fresh + i) * b2 + g * g * rest2;
        Lanes::template put<Float32>(mu + i, m);
        Lanes::template put<Float32>(fresh + i, f);
        Lanes::template put<Float32>(before + i, m / (Lanes::root(v) + eps));
    }
};

}  // namespace

EXPORT(local_momentum)(float* grad, const float* mu, int64_t count, float b1, float rest1, float scale, int threads) {
    LocalMomentum op = {grad, mu, b1, rest1, scale};
    sweep(op, count, nullptr, threads);
}

// copy_dtype: 1 bfloat16, 2 half, -1 for none.
EXPORT(frozen_step)(float* param, float* mu, const float* nu, uint16_t* copy, int copy_dtype, int64_t count, float size,
                    float eps, float weight_decay, int threads) {
    with_copy(copy_dtype, [&](auto narrow) {
        FrozenStep<decltype(narrow)> op = {param, mu, nu, copy, size, eps, weight_decay};
        sweep(op, count, copy, threads);
    });
}

EXPORT(local_step)(const float* grad, float* mu, const float* nu, float* moved, int64_t count, float size, float b1,
                   float rest1, float eps, float scale, int threads) {
    LocalStep op = {grad, mu, nu, moved, size, b1, rest1, eps, scale};
    sweep(op, count, nullptr, threads);
}

EXPORT(fresh_step)(float* mu, float* before, const float* nu, float* fresh, int64_t count, float b1, float rest1,
                   float b2, float rest2, float eps, float spread, int threads) {
    FreshStep op = {mu, before, nu, fresh, b1, rest1, b2, rest2, eps, spread};
    sweep(op, count, nullptr, threads);
}
