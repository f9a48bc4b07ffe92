// Cross entropy of rows of logits on the CPU; the gradients replace the logits. See __init__.py for the mathematics. Compiled once
// per instruction set (ISA names it).
#include "../common/rows.h"
#include "../common/simd_math.h"

namespace {

template <typename Type>
void losses(void* logits, const int64_t* targets, int64_t ignored, float smoothing, int gradients, int64_t rows,
            int64_t words, float* out, int threads) {
    typedef typename Type::Element Element;
    const float lowest = -__builtin_inff(), nan = __builtin_nanf("");
    each_row(rows, words, threads, [&](int64_t row) {
        Element* z = static_cast<Element*>(logits) + row * words;
        int64_t target = targets[row];
        out[row] = target == ignored ? 0 : nan;
        if (target == ignored || target < 0 || target >= words) {  // the caller raises for a target outside the words
            if (gradients) memset(z, 0, size_t(words) * sizeof(Element));
            return;
        }
        Floats most = all(lowest), plain = {};
        vectors(words, [&](int64_t i, int64_t n) {
            Floats value = get<Type>(z + i, n);
            plain += value;
            for (int64_t lane = n; lane < W; ++lane) value[lane] = lowest;
            most = value < most ? most : value;
        });
        float largest = lowest;
        for (int lane = 0; lane < W; ++lane) largest = most[lane] < largest ? largest : most[lane];
        Floats sums = {};
        vectors(words, [&](int64_t i, int64_t n) { sums += first(exponential(get<Type>(z + i, n) - largest), n); });
        float total = sum(sums), chosen = Type::get(z + target);
        float spread = smoothing ? smoothing * (sum(plain) / float(words)) : 0;  // a score of −∞ is no NaN without smoothing
        out[row] = largest + __builtin_logf(total) - (1 - smoothing) * chosen - spread;
        if (!gradients) return;
        float inverse = 1 / total, shared = smoothing / float(words);
        vectors(words, [&](int64_t i, int64_t n) {
            put<Type>(z + i, exponential(get<Type>(z + i, n) - largest) * inverse - shared, n);
        });
        float probability = __builtin_expf(chosen - largest) * inverse;
        Type::put(z + target, probability - (1 - smoothing) - shared);
    });
}

}  // namespace

// dtype: 0 float, 1 bfloat16. out: a loss per row; NaN where the target is none of the words and not ignored.
EXPORT(cross_entropy)(void* logits, int dtype, const int64_t* targets, int64_t ignored, float smoothing, int gradients,
                      int64_t rows, int64_t words, float* out, int threads) {
    BY_TYPE(dtype, losses, logits, targets, ignored, smoothing, gradients, rows, words, out, threads);
}
