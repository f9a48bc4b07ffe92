// The second half of a decoder's layer, for a few tokens, on the CPU; see __init__.py. Compiled once per instruction set.
#include "../common/simd_math.h"
#include "../common/thin.h"

namespace {

// In the order of `MLP.linears` in __init__.py. Without experts `router` has no values; with them the others have a group for
// each. Where `up` has no values, `gate` has its rows too, after its own.
struct Layer {
    Matrix router, gate, up, down;
};

template <typename Type>
using Row = std::vector<typename Type::Element>;

// Rounds to Type and back.
template <typename Type>
inline Floats rounded(Floats values) {
    typename Type::Element stored[W];
    Type::store(stored, values);
    return Type::load(stored);
}

// down · (silu(gate · x) ⊙ (up · x)) for rows of one expert.
template <typename Type>
void expert(const Layer& layer, int64_t number, const typename Type::Element* x, int64_t rows, typename Type::Element* y,
            int threads) {
    const int64_t inner = layer.down.columns, stride = layer.gate.outputs;
    Row<Type> gates(size_t(rows * stride)), ups(size_t(layer.up.values ? rows * inner : 0)), products(size_t(rows * inner));
    product<Type>(layer.gate, number, x, rows, gates.data(), threads);
    if (layer.up.values) product<Type>(layer.up, number, x, rows, ups.data(), threads);
    for (int64_t row = 0; row < rows; ++row) {
        const typename Type::Element *gate = gates.data() + row * stride,
                                     *up = layer.up.values ? ups.data() + row * inner : gate + inner;
        vectors(inner, [&](int64_t i, int64_t n) {
            const Floats g = get<Type>(gate + i, n);
            put<Type>(products.data() + row * inner + i, rounded<Type>(g * sigmoid(g)) * get<Type>(up + i, n), n);
        });
    }
    product<Type>(layer.down, number, products.data(), rows, y, threads);
}

// The `choices` experts of the largest probabilities, the largest first and of equals the first, and the probabilities.
template <typename Type>
void choose(const typename Type::Element* logits, int64_t count, int64_t choices, bool renormalises, int64_t* experts,
            float* weights) {
    std::vector<float> odds(size_t(count), 0.0f);
    float most = Type::get(logits), total = 0;
    for (int64_t i = 1; i < count; ++i) most = Type::get(logits + i) > most ? Type::get(logits + i) : most;
    vectors(count, [&](int64_t i, int64_t n) {
        const Floats values = first(exponential(get<Type>(logits + i, n) - most), n);
        total += sum(values);
        put<Float32>(odds.data() + i, values, n);
    });
    float kept = 0;
    for (int64_t j = 0; j < choices; ++j) {
        int64_t best = -1;
        for (int64_t i = 0; i < count; ++i) {
            bool taken = false;
            for (int64_t before = 0; before < j; ++before) taken |= experts[before] == i;
            if (!taken && (best < 0 || odds[size_t(i)] > odds[size_t(best)])) best = i;
        }
        experts[j] = best;
        weights[j] = odds[size_t(best)] / total;
        kept += weights[j];
    }
    if (renormalises)
        for (int64_t j = 0; j < choices; ++j) weights[j] /= kept;
}

// Each token's experts, an expert's tokens at a time; then the sum over a token's choices, in their order.
template <typename Type>
void by_experts(const Layer& layer, const typename Type::Element* x, int64_t rows, int64_t choices, bool renormalises,
                typename Type::Element* y, int threads) {
    const int64_t width = layer.down.outputs, count = layer.router.outputs, bytes = width * int64_t(sizeof(*y));
    Row<Type> logits(size_t(rows * count)), gathered(size_t(rows * width)), results(size_t(rows * width));
    Row<Type> outputs(size_t(rows * choices * width));
    std::vector<int64_t> experts(size_t(rows * choices)), here(size_t(rows), 0);
    std::vector<float> weights(size_t(rows * choices));
    product<Type>(layer.router, 0, x, rows, logits.data(), threads);
    for (int64_t row = 0; row < rows; ++row)
        choose<Type>(logits.data() + row * count, count, choices, renormalises, experts.data() + row * choices,
                     weights.data() + row * choices);
    for (int64_t number = 0; number < count; ++number) {
        int64_t found = 0;
        for (int64_t a = 0; a < rows * choices; ++a)
            if (experts[size_t(a)] == number) {
                memcpy(gathered.data() + found * width, x + a / choices * width, size_t(bytes));
                here[size_t(found++)] = a;
            }
        if (!found) continue;
        expert<Type>(layer, number, gathered.data(), found, results.data(), threads);
        for (int64_t i = 0; i < found; ++i)
            memcpy(outputs.data() + here[size_t(i)] * width, results.data() + i * width, size_t(bytes));
    }
    for (int64_t row = 0; row < rows; ++row)
        vectors(width, [&](int64_t i, int64_t n) {
            Floats sums = {};
            for (int64_t a = row * choices; a < (row + 1) * choices; ++a)
                sums = fma(all(weights[size_t(a)]), get<Type>(outputs.data() + a * width + i, n), sums);
            put<Type>(y + row * width + i, sums, n);
        });
}

template <typename Type>
void layer_of(const void* x_, int64_t rows, const Layer& layer, const void* norm, float eps, int64_t choices,
              bool renormalises, void* y_, int threads) {
    typedef typename Type::Element Element;
    const Element* x = static_cast<const Element*>(x_);
    Element* y = static_cast<Element*>(y_);
    const int64_t width = layer.down.outputs;
    Row<Type> normed(size_t(rows * width));
    rms_norm<Type>(x, norm, eps, rows, width, normed.data());
    if (layer.router.values) by_experts<Type>(layer, normed.data(), rows, choices, renormalises, y, threads);
    else expert<Type>(layer, 0, normed.data(), rows, y, threads);
    add<Type>(x, y, rows * width, y);
}

}  // namespace

// x, y: [rows][width], of dtype 0 float or 1 bfloat16, as all weights that are not quantised are.
EXPORT(decoder_mlp)(const void* x, int dtype, int64_t rows, const Layer* layer, const void* norm, float eps, int64_t choices,
                    int renormalises, void* y, int threads) {
    BY_TYPE(dtype, layer_of, x, rows, *layer, norm, eps, choices, renormalises, y, threads);
}
