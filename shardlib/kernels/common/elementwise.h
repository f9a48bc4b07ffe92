// Loops over flat buffers for elementwise operations, such as optimizers' steps. An operation is written once, for Lanes that
// are `Wide` (W elements) or `One`, and gives the same bits with both: wherever threads cut a buffer, and for every
// instruction set.
//
// Denormals are read and written as zero: a moment whose gradients have become zero decays through them, and an operation on
// one takes a hundred cycles or more.
#pragma once
#include <type_traits>

#include "halves.h"

namespace {

constexpr int64_t LINE = 64 / sizeof(uint16_t);  // elements of 16 bits in a line of the caches

// The type of a copy that is not asked for: nothing is written.
struct Nothing {
    typedef uint16_t Element;
};

struct Wide {
    template <typename Type>
    static Floats get(const typename Type::Element* from) {
        __builtin_prefetch(from + 512);  // the hardware's prefetching stops at every 4 KB; asking ahead won 12 %
        return Type::load(from);
    }
    template <typename Type>
    static void put(typename Type::Element* to, Floats values) { Type::store(to, values); }

    // Writes past the caches, so that the processor need not read the lines first; `to` is aligned to W elements.
    template <typename Type>
    static void stream(typename Type::Element* to, Floats values) {
#if defined(__AVX512F__)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bitcast<__m256i>(Type::pack(values)));
#elif defined(__AVX2__)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to), bitcast<__m128i>(Type::pack(values)));
#else
        ::store(to, Type::pack(values));
#endif
    }

    // The same for a buffer of the states' dtype.
    template <typename Type>
    static void pass(typename Type::Element* to, Floats values) {
        if constexpr (sizeof(typename Type::Element) == 2) {
            stream<Type>(to, values);
        } else {
#if defined(__AVX512F__)
            _mm512_stream_ps(to, bitcast<__m512>(values));
#elif defined(__AVX2__)
            _mm256_stream_ps(to, bitcast<__m256>(values));
#else
            put<Type>(to, values);
#endif
        }
    }

    static Floats root(Floats values) {
#if defined(__AVX512F__)
        return _mm512_sqrt_ps(values);
#elif defined(__AVX2__)
        return _mm256_sqrt_ps(values);
#else
        for (int k = 0; k < W; ++k) values[k] = __builtin_sqrtf(values[k]);
        return values;
#endif
    }
};

struct One {
    template <typename Type>
    static float get(const typename Type::Element* from) { return Type::get(from); }
    template <typename Type>
    static void put(typename Type::Element* to, float value) { Type::put(to, value); }
    template <typename Type>
    static void stream(typename Type::Element* to, float value) { Type::put(to, value); }
    template <typename Type>
    static void pass(typename Type::Element* to, float value) { Type::put(to, value); }
    static float root(float value) { return __builtin_sqrtf(value); }
};

template <>
inline void Wide::stream<Nothing>(uint16_t*, Floats) {}
template <>
inline void One::stream<Nothing>(uint16_t*, float) {}

// Makes this thread take denormals for zero during the object's lifetime.
class FlushDenormals {
#if defined(__SSE2__)
    unsigned before = _mm_getcsr();

public:
    FlushDenormals() {
        _mm_setcsr(before | 0x8040);
        asm volatile("" ::: "memory");
    }
    ~FlushDenormals() {
        asm volatile("" ::: "memory");
        _mm_setcsr(before);
    }
#elif defined(__aarch64__)
    uint64_t before;

public:
    FlushDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before));
        asm volatile("msr fpcr, %0" ::"r"(before | 1 << 24) : "memory");
    }
    ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(before) : "memory"); }
#endif
};

// A tensor of a step's state: where it is read, and where it is written, which is elsewhere if the old state is to stay.
template <typename Type>
struct State {
    typedef typename Type::Element Element;
    const Element* from;
    Element* to;

    State(const void* from, void* to) : from(static_cast<const Element*>(from)), to(static_cast<Element*>(to)) {}

    template <typename Lanes>
    auto get(int64_t i) const { return Lanes::template get<Type>(from + i); }

    // Memory that is only written is written past the caches.
    template <typename Lanes, bool elsewhere, typename Values>
    void put(int64_t i, Values values) const {
        if constexpr (elsewhere) Lanes::template pass<Type>(to + i, values);
        else Lanes::template put<Type>(to + i, values);
    }

    // Whether lines of `to` begin where those of a buffer of 16-bit elements do, or at its first element if that is null.
    bool elsewhere(const uint16_t* streamed) const {
        int64_t head = -(reinterpret_cast<uintptr_t>(streamed) / sizeof(uint16_t)) % LINE;
        return from != to && reinterpret_cast<uintptr_t>(to + head) % 64 == 0;
    }
};

// Calls visit(std::bool_constant) for whether all of a step's states are written past the caches.
template <typename Visit, typename... States>
inline void with_states(const uint16_t* streamed, Visit visit, const States&... states) {
    if ((states.elsewhere(streamed) && ...)) visit(std::true_type{});
    else visit(std::false_type{});
}

// Calls op.at<Lanes>(i) over all elements. `streamed` is the buffer that the operation streams to, or null.
template <typename Op>
inline void sweep(const Op& op, int64_t count, const uint16_t* streamed, int threads) {
    const int64_t grain = threads < 0 ? LINE : 1 << 15;
    int64_t head = smaller(count, int64_t(-(reinterpret_cast<uintptr_t>(streamed) / sizeof(uint16_t)) % LINE));
    int64_t grains = (count - head + grain - 1) / grain;
    parallel(larger(grains, 1), worth(threads, grains, 4), [&](int64_t first, int64_t last) {
        FlushDenormals flush;
        int64_t i = first ? head + first * grain : 0, stop = smaller(head + last * grain, count);
        for (; i < smaller(head, stop); ++i) op.template at<One>(i);
        for (; i + W <= stop; i += W) op.template at<Wide>(i);
        for (; i < stop; ++i) op.template at<One>(i);
#if defined(__AVX2__)
        _mm_sfence();
#endif
    });
}

// Calls visit(Type{}) for the dtype of a copy: 1 bfloat16, 2 half, -1 for no copy.
template <typename Visit>
inline void with_copy(int dtype, Visit visit) {
    if (dtype == 1) visit(BFloat16{});
    else if (dtype == 2) visit(Float16{});
    else visit(Nothing{});
}

// Calls visit(Type{}, Type{}, Type{}) for the dtypes of a step's states, gradient and copy: 0 float, 1 bfloat16, 2 half; of the
// copy -1 for none.
template <typename Visit>
inline void with_types(int dtype, int grad_dtype, int copy_dtype, Visit visit) {
    with_type(dtype, [&](auto kept) {
        with_type(grad_dtype, [&](auto read) {
            with_copy(copy_dtype, [&](auto narrow) { visit(kept, read, narrow); });
        });
    });
}

}  // namespace
