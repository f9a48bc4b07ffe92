// Random bits from a counter on the CPU; see __init__.py. Compiled once per instruction set (ISA names it).
#include "../common/counter.h"
#include "../common/rows.h"

EXPORT(random_bits)(int64_t seed, const int64_t* index, int64_t count, int64_t* out, int threads) {
    uint32_t low = uint32_t(seed), high = uint32_t(uint64_t(seed) >> 32);
    parallel(count, enough(threads, count), [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; ++i)
            out[i] = mix(mix(uint32_t(index[i]) ^ low) ^ mix(uint32_t(uint64_t(index[i]) >> 32) ^ high)) >> 8;
    });
}
