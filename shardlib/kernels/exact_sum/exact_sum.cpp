// The digits of Σ x² on the CPU; see __init__.py and digits.py. Compiled once per instruction set (ISA names it).
#include "../common/halves.h"

namespace {

constexpr int64_t SPAN = 1 << 18;   // elements that a thread takes at a time
constexpr int64_t BLOCK = 1 << 16;  // elements whose squares of one exponent fit 64 bits together
constexpr int PLACES = 67, TABLES = 4, EXPONENTS = 256;

// Adds sums[e] · 2^(2e - 300), for each biased exponent e, to digits of base 2^32 that count from 2^-1074.
inline void place(const uint64_t* sums, int64_t* digits) {
    const uint64_t low = 0xffffffff;
    for (int e = 0; e < EXPONENTS - 1; ++e)
        if (uint64_t sum = sums[e]) {
            int bit = 2 * (e ? e : 1) + 774, first = bit >> 5, shift = bit & 31;
            uint64_t a = (sum & low) << shift, b = (sum >> 32) << shift;
            digits[first] += a & low;
            digits[first + 1] += (a >> 32) + (b & low);
            digits[first + 2] += b >> 32;
        }
}

template <typename Type>
inline void add(const typename Type::Element* x, int64_t count, int64_t* digits, double* strange) {
    for (int64_t start = 0; start < count; start += BLOCK) {
        // Several tables, as a sum must not wait for the one before it when both have the same exponent.
        uint64_t sums[TABLES][EXPONENTS] = {};
        int64_t stop = smaller(start + BLOCK, count);
        for (int64_t i = start; i < stop; ++i) {
            uint32_t bits = bitcast<uint32_t>(Type::get(x + i)), e = bits >> 23 & 255;
            uint64_t mantissa = (bits & 0x7fffff) | (e ? 0x800000 : 0);
            sums[i % TABLES][e] += mantissa * mantissa;
        }
        uint64_t beyond = 0;
        for (auto& table : sums) beyond |= table[EXPONENTS - 1];
        if (beyond)
            for (int64_t i = start; i < stop; ++i) {
                double value = Type::get(x + i);
                if (value - value != 0) *strange += value * value;
            }
        for (auto& table : sums) place(table, digits);
    }
}

}  // namespace

// dtype: 0 float, 1 bfloat16, 2 half. digits: PLACES per span, strange: one per span; both zeros before.
EXPORT(digits_of_squares)(const void* x, int dtype, int64_t count, int64_t* digits, double* strange, int threads) {
    with_type(dtype, [&](auto type) {
        typedef decltype(type) Type;
        const auto* from = static_cast<const typename Type::Element*>(x);
        int64_t spans = (count + SPAN - 1) / SPAN;
        parallel(spans, worth(threads, spans, 1), [&](int64_t first, int64_t last) {
            for (int64_t span = first; span < last; ++span)
                add<Type>(from + span * SPAN, smaller(SPAN, count - span * SPAN), digits + span * PLACES, strange + span);
        });
    });
}
