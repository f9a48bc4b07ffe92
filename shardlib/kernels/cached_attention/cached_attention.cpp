// Attention of one new token of each sequence to a cache on the CPU; see __init__.py. Compiled once per instruction set.
#include "../common/attend.h"

// dtype: 0 float, 1 bfloat16. scores: number · heads · room floats.
EXPORT(cached_attention)(const void* q, const void* k, const void* v, void* keys, void* values, const int64_t* rows,
                         const int64_t* starts, int dtype, int64_t number, int64_t heads, int64_t kv_heads, int64_t room,
                         int64_t size, int64_t window, float* scores, void* y, int threads) {
    BY_TYPE(dtype, attend, q, k, v, keys, values, rows, starts, number, heads, kv_heads, room, size, window, scores, y, threads);
}
