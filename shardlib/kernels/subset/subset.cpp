// Tokens by their positions on the CPU; see __init__.py for the mathematics. Compiled once per instruction set (ISA names it).
#include "../common/rows.h"

namespace {

// Copies a token of so many bytes, or sets it to zero where there is none.
inline void move(char* to, const char* from, int64_t bytes) {
    if (from)
        memcpy(to, from, size_t(bytes));
    else
        memset(to, 0, size_t(bytes));
}

}  // namespace

// index: [batch][taken]. A position outside of [0, length) gives a token of zeros.
EXPORT(take)(const void* x_, const int64_t* index, int64_t batch, int64_t taken, int64_t length, int64_t bytes,
             void* out_, int threads) {
    const char* x = static_cast<const char*>(x_);
    char* out = static_cast<char*>(out_);
    each_row(batch * taken, bytes / 4, threads, [&](int64_t row) {
        const int64_t at = index[row];
        const bool inside = uint64_t(at) < uint64_t(length);
        move(out + row * bytes, inside ? x + (row / taken * length + at) * bytes : nullptr, bytes);
    });
}

// slots: [batch][length], the place of each token among those that are put, or −1. x and rows may be null, for zeros.
EXPORT(put)(const void* x_, const void* rows_, const int64_t* slots, int64_t batch, int64_t taken, int64_t length,
            int64_t bytes, void* out_, int threads) {
    const char *x = static_cast<const char*>(x_), *rows = static_cast<const char*>(rows_);
    char* out = static_cast<char*>(out_);
    each_row(batch * length, bytes / 4, threads, [&](int64_t token) {
        const int64_t slot = slots[token];
        const char* from = nullptr;
        if (slot < 0)
            from = x ? x + token * bytes : nullptr;
        else
            from = rows ? rows + (token / length * taken + slot) * bytes : nullptr;
        move(out + token * bytes, from, bytes);
    });
}
