// exp and the error function of vectors of floats, each within a few units in the last place of the exact value.
#pragma once

#include "simd.h"

namespace {

// a·b + c, rounded once where the processor can.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// c[0] + c[1]·x + c[2]·x² + …
template <int N>
inline Floats polynomial(Floats x, const float (&c)[N]) {
    Floats sum = all(c[N - 1]);
    for (int i = N - 2; i >= 0; --i) sum = fused(sum, x, all(c[i]));
    return sum;
}

// 1/x for finite x.
inline Floats reciprocal(Floats x) {
#if defined(__AVX512F__)
    Floats r = _mm512_rcp14_ps(x);
    return r * fused(-x, r, all(2.0f));  // a step of Newton's
#else
    return 1.0f / x;
#endif
}

// y·2^n, for whole n from −150 to 128.
inline Floats times_power_of_two(Floats y, Floats n) {
#if defined(__AVX512F__)
    return _mm512_scalef_ps(y, n);
#else
    Ints whole = __builtin_convertvector(n, Ints), half = whole >> 1;  // 2^n itself may lie outside the floats
    return y * bitcast<Floats>((half + 127) << 23) * bitcast<Floats>((whole - half + 127) << 23);
#endif
}

// e^x = 2^n · e^r with |r| ≤ ln 2 / 2, and e^r = 1 + r + r²·q(r); q by least squares, relative error 3e-9.
inline Floats exponential(Floats x) {
    const float q[] = {0.49999994f, 0.166665196f, 0.0416683927f, 0.00836878084f, 0.00138144812f};
    const float magic = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
    Floats within = x < -104.0f ? all(-104.0f) : (x > 89.0f ? all(89.0f) : x);
    Floats n = fused(within, all(1.44269504f), all(magic)) - magic;
    Floats r = fused(n, all(-0.693359375f), within);  // ln 2 as a sum of two numbers, the first exact times n
    r = fused(n, all(2.12194440e-4f), r);
    return times_power_of_two(fused(polynomial(r, q), r * r, r) + 1.0f, n);
}

// 1 / (1 + e^−x)
inline Floats sigmoid(Floats x) {
    Floats bounded = x < -87.0f ? all(-87.0f) : x;  // e^87 is finite
    return reciprocal(1.0f + exponential(-bounded));
}

// Φ(x), the normal distribution function, and e^(−x²/2), from which it is computed.
// With z = |x|/√2: erfc(z) = e^(−z²) · q(1 / (1 + z/2.5)), q by least squares, relative error 3e-8 up to z = 9.5.
struct Normal {
    Floats below, density;
};

inline Normal normal(Floats x) {
    const float q[] = {3.16856967e-5f, 0.224978313f, 0.232236043f,  0.173233837f,   0.280949086f,
                       -0.0919011012f, 0.304316282f, -0.0854230225f, -0.0653638616f, 0.0269427653f};
    Floats z = (x < 0 ? -x : x) * 0.707106781f;
    z = z > 30.0f ? all(30.0f) : z;  // reciprocal() takes no infinity, and there is no tail left
    Floats density = exponential(x * x * -0.5f);
    Floats tail = density * polynomial(reciprocal(fused(z, all(0.4f), all(1.0f))), q) * 0.5f;
    return {x < 0 ? tail : 1.0f - tail, density};
}

}  // namespace
